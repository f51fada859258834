"""Profiles: the seconds and bytes of layers on kinds of devices, their files, and the costs of stages made of them."""
