"""A pipe whose workers are processes.

* `mesh`: `init`, and the `Mesh` of all processes.
* `backend`: the backend of such a pipe: the part of one rank.
* `agreement`, `contract`: before any work, all ranks compare what they were started with.
* `rendezvous`: all ranks of a pipe make the groups and channels between them.
* `peer_group`: the ranks of one pipe, and the calls that they make together.
* `layer_group`: the ranks that compute the same layers together, on the same data.
* `layer_collectives`: collectives that layers call themselves: how they fail, and how they are ended.
* `shared_tensors`: which parameters and buffers must be the same on ranks that have the same layers.
* `step_header`, `data_digest`: at the beginning of a call, the ranks compare what they call, and with which data.
* `generator_states`: after a call that has failed, all ranks have drawn its random key, or none has.
* `delivered_losses`: whether all ranks have called `backward()`.
* `all_gather`: every rank gives bytes, and gets those of all.
* `optimizer_check`, `parameter_check`: find an optimizer with parameters of other ranks, and a rank without any.
* `faults`: faults on purpose, for tests of what follows them.
* `store_prefix`: keeps the keys of two attempts of a job apart.

Messages are in `transport`, gradients of several ranks in `gradients`, failures in `health`.
"""
