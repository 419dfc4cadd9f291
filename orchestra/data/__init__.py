"""Text as samples of tokens, in an order that is a function of the seed and the position alone.

It knows no mesh and no model. Only the loader imports torch.
"""
