"""Gradients that concern several ranks.

* `data_parallel`: the mean over replicas, which of them share a parameter, and whether all train the same ones.
* `tied`: the sum for a parameter that stages of several ranks use.
* `grad_norm`: the norm of the gradients of all ranks.
* `found_inf`: an overflow on one rank counts on all.
"""
