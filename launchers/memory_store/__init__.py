"""Copies of the ranks' state in the memory of nodes: kept, exchanged and fetched back.

node_store   `NodeCopies`, what an agent uses from a job's start to its end
store        the folder of one node, in memory
exchange     how copies get from node to node: a server, a sender, a fetch
"""
