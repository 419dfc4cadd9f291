"""Copies of the ranks' state in the memory of nodes: kept, exchanged and fetched back.

store      the folder of one node, in memory
exchange   how copies get from node to node: a server, a sender, a fetch; and `NodeCopies` for agents
"""
