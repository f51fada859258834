"""Messages between ranks.

* `rank_transport`: the transport of one run: which values go through queues, and which through channels.
* `groups`: how process groups are made, and how they end; the protocol `Group` is what is used of them.
* `channel`: messages between two ranks, in order; between accelerators without the CPU.
* `header`: dtypes and shapes of the tensors of a message, and the structure around them.
"""
