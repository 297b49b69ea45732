"""The backend ``"scan"``: own operators for GRU and LSTM over packed rows, with hand-written gradients.

What need not wait for the step before is done for all rows at once: the product with the input, the slope of
every gate, the gradients of the weights. What is left of a step is one matrix product and a few elementwise
passes in place. The operators' shapes follow from those of their arguments alone, so ``torch.compile`` takes them
into one graph. They are differentiable once.

The gates are column blocks of ``[N, 4 H]``; in the order of the stock networks, rolled by one block:

* GRU: ``n r z u``, where ``u`` is the hidden part of ``n`` before the reset gate; the input is read by ``n r z``, the
  state by ``r z u``;
* LSTM: ``o i f g``.
"""

