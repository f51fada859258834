"""A pipe whose workers are processes.

* `mesh`: `init`, and the `Mesh` of all processes.
* `backend`: the backend of such a pipe: the part of one rank.
* `agreement`: before any work, all ranks compare what they were started with.
* `rendezvous`: all ranks of a pipe make the groups and channels between them.
* `peer_group`: the ranks of one pipe, the calls that they make together, and how these fail.
* `step_calls`, `data_digest`: at the beginning of a call, the ranks compare what they call, and with which data.
* `shared_tensors`: which parameters and buffers must be the same on ranks that have the same layers.
* `store_prefix`: keeps the keys of two attempts of a job apart.

Messages are in `transport`, gradients of several ranks in `gradients`, failures in `health`.
"""
