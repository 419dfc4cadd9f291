"""Text as samples of tokens, in an order that is a function of the seed and the position alone.

Only the loader imports torch, so commands read token files without it.
"""
