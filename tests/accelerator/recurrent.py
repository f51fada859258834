"""Cells of GRU and LSTM: on devices other than the CPU, PyTorch asks for kernels that the CPU does not have."""

import torch
from torch import Tensor


def register() -> torch.library.Library:
    """Gives the device the four operators; they are there as long as the library is kept."""
    library = torch.library.Library("aten", "IMPL")
    for kernel in (
        _thnn_fused_gru_cell,
        _thnn_fused_gru_cell_backward,
        _thnn_fused_lstm_cell,
        _thnn_fused_lstm_cell_backward_impl,
    ):
        library.impl(kernel.__name__, kernel, "PrivateUse1")
    return library


def _gates(of_input: Tensor, of_hidden: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None):
    if input_bias is not None and hidden_bias is not None:
        return of_input + input_bias, of_hidden + hidden_bias
    return of_input, of_hidden


def _thnn_fused_gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    of_input, of_hidden = _gates(input_gates, hidden_gates, input_bias, hidden_bias)
    input_reset, input_update, input_new = of_input.chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = of_hidden.chunk(3, 1)
    reset = (hidden_reset + input_reset).sigmoid()
    update = (hidden_update + input_update).sigmoid()
    new = (input_new + reset * hidden_new).tanh()
    return (hx - new) * update + new, torch.cat([reset, update, new, hx, hidden_new], 1)


def _thnn_fused_gru_cell_backward(grad_hy, workspace, has_bias):
    reset, update, new, hx, hidden_new = workspace.chunk(5, 1)
    of_update = grad_hy * (hx - new) * update * (1 - update)
    of_new = grad_hy * (1 - update) * (1 - new * new)
    of_reset = of_new * hidden_new * reset * (1 - reset)
    of_input = torch.cat([of_reset, of_update, of_new], 1)
    of_hidden = torch.cat([of_reset, of_update, of_new * reset], 1)
    return of_input, of_hidden, grad_hy * update, of_input.sum(0), of_hidden.sum(0)


def _thnn_fused_lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    entry, forget, cell, out = sum(_gates(input_gates, hidden_gates, input_bias, hidden_bias)).chunk(4, 1)
    entry, forget, cell, out = entry.sigmoid(), forget.sigmoid(), cell.tanh(), out.sigmoid()
    cy = forget * cx + entry * cell
    return out * cy.tanh(), cy, torch.cat([entry, forget, cell, out], 1)


def _thnn_fused_lstm_cell_backward_impl(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    entry, forget, cell, out = workspace.chunk(4, 1)
    bent = cy.tanh()
    of_cy = torch.zeros_like(cy) if grad_cy is None else grad_cy
    of_out = torch.zeros_like(out)
    if grad_hy is not None:
        of_cy = of_cy + grad_hy * out * (1 - bent * bent)
        of_out = grad_hy * bent * out * (1 - out)
    of_entry = of_cy * cell * entry * (1 - entry)
    of_forget = of_cy * cx * forget * (1 - forget)
    of_cell = of_cy * entry * (1 - cell * cell)
    gates = torch.cat([of_entry, of_forget, of_cell, of_out], 1)
    return gates, of_cy * forget, gates.sum(0)
