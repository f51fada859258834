"""One stage at run time: its layers, buffers, loss and memory."""
