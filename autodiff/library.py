"""Library calls: a library function's name and arguments -> a pure Relax call of it, and the table of conventions.

A *library call* is a pure Relax call ``R.call_pure_packed("library.<name>", *args, ty_args=...)``. Its
arguments are tensors, ``R.prim_value`` / ``R.str`` / ``R.shape`` constants, or tuples of tensors, and its
result type is explicit. Nothing here computes: the runtime of a compiled program binds the names
(``bridge.library`` binds them to PyTorch's kernels). Gradient rules for library functions are in
``autodiff.gradients.library``.

Calling conventions. ``(..)`` is a shape constant, ``:int`` an integer (truth values are 0 or 1), ``:float`` a float;
all other arguments are tensors. A gradient has the type of the tensor it belongs to, unless said otherwise.

================================================ =======================================================================
``embedding``                                    weight, indices, padding_idx:int (-1: none), scale_grad_by_freq:int
                                                 -> rows of weight
``embedding_backward``                           grad, indices, num_weights:int, padding_idx:int,
                                                 scale_grad_by_freq:int -> dweight
``scaled_dot_product_flash_attention``           q, k, v, has_mask:int, [attn_mask if has_mask], dropout_p:float,
                                                 is_causal:int, scale:float -> tuple (out, logsumexp)
``scaled_dot_product_flash_attention_backward``  grad_out, q, k, v, out, logsumexp, has_mask:int, [attn_mask],
                                                 dropout_p:float, is_causal:int, scale:float -> tuple (dq, dk, dv)
``attention``                                    kernel:str, q, k, v, has_mask:int, [attn_mask if has_mask],
                                                 is_causal:int, scale:float -> tuple (out [batch, row, head, column],
                                                 logsumexp)
``attention_backward``                           kernel:str, grad_out, q, k, v, out, logsumexp, has_mask:int,
                                                 [attn_mask], is_causal:int, scale:float -> tuple (dq, dk, dv),
                                                 each [batch, row, head, column]
                                                 has_mask is 2 where the mask is learned: dmask comes behind dv then
``dropping_attention``,                          as without dropout, then dropout_p:float, advance:int, state: the
``dropping_attention_backward``                  generator's before the call, and how far that moves it
``convolution``                                  x, weight, (stride), (padding), (dilation), (output_padding),
                                                 transposed:int, groups:int[, bias, added before rounding] -> y
``convolution_backward_input``                   grad, weight, (shape of x), then as ``convolution`` -> dx
``convolution_backward_weight``                  grad, x, (shape of weight), then as ``convolution`` -> dweight
``convolution_last``,                            as with channels first, except that the last axis of the result is its
``convolution_last_backward_input``,             channels, the last axis of dweight its input channels
``convolution_last_backward_weight``
``matmul_bias``                               two matrices, bias, (shape) -> their product, the bias added to each
                                                 row, in that shape
``max_pool``                                     x, (kernel), (stride), (padding), (dilation), ceil_mode:int
                                                 -> tuple (y, positions), positions int64 within a channel
``max_pool_backward``                            grad, positions, (shape of x), then as ``max_pool`` -> dx
``max_pool_last``, ``max_pool_last_backward``    as with channels first, except that channels are the results' last axis
``adaptive_max_pool``                            x, (output size) -> tuple (y, positions)
``adaptive_max_pool_backward``                   grad, positions, (shape of x), (output size) -> dx
``avg_pool``                                     x, (kernel), (stride), (padding), ceil_mode:int,
                                                 count_include_pad:int, divisor:int (0: the window) -> y
``avg_pool_backward``                            grad, (shape of x), then as ``avg_pool`` -> dx
``adaptive_avg_pool``                            x, (output size) -> y
``adaptive_avg_pool_backward``                   grad, (shape of x), (output size) -> dx
``avg_pool_last``, ``avg_pool_last_backward``,   as with channels first, except that channels are the results' last axis
``adaptive_avg_pool_last``,
``adaptive_avg_pool_last_backward``,
``upsample_last``, ``upsample_last_backward``
``index``                                        x, (dims), tuple of integer tensors, one per dim -> x at the indices,
                                                 placed as PyTorch places them
``index_backward``                               grad, (shape of x), (dims), the same tuple -> zeros with grad added
``index_put``                                    x, values, (dims), tuple of integer tensors, accumulate:int -> x with
                                                 values, of the shape that ``index`` returns, written (added) there
``index_select``                                 x, axis:int, index -> the slices of x at the indices, none negative
``index_add``, ``index_copy``                    x, axis:int, index, source -> x with the slices of source added to, or
                                                 replacing, the slices at the indices, none negative
``log1p``, ``expm1``, ``exp2``, ``erfc``         x -> y, element by element
``atan2``, ``fmod``, ``remainder``,              a, b of one shape -> y, element by element
``divide_floor``, ``divide_trunc``,
``binary_cross_entropy``
``extent``                                       n:int -> a size as a 0-d tensor of the call's type; only where the size
                                                 depends on symbols (see :func:`number`), else it is a constant
``sort``                                         x, axis:int, descending:int, stable:int -> tuple (values, positions)
``topk``                                         x, axis:int, k:int, largest:int, sorted:int -> tuple
``kthvalue``                                     x, axis:int, k:int -> tuple, the axis of extent 1
``max_dim``, ``min_dim``, ``median_dim``,        x, axis:int -> tuple, the axis of extent 1
``nanmedian_dim``, ``mode_dim``
``cummax``, ``cummin``                           x, axis:int -> tuple
``recurrent_layer``                              options:str, states:int, x, weights and biases, initial states ->
                                                 tuple (y, last states, workspace for the backward): one layer in one
                                                 direction, time in front; options are JSON {cell, reverse, biases,
                                                 fused}; states: how many the cell has
``recurrent_layer_backward``                     options:str, count:int, the ``count`` tensors, all results, gradients
                                                 of y and the last states -> tuple of a gradient for each tensor
``recurrent_layers``                             options:str, states:int, x, weights and biases, initial states ->
                                                 tuple (y, last states, workspace): all layers and directions, time in
                                                 front; options are JSON {cell, layers, both_ways, biases}
``recurrent_layers_backward``                    as ``recurrent_layer_backward``
``draw``                                         name:str, description:str, state, parameters.., then (sizes) if the
                                                 description names some -> tuple (the result of the library's random
                                                 operator of that name, the next state)
``draw_at_offset``                               name:str, description:str, advance:int, state, parameters.. -> the
                                                 result of the library's random operator of that name, for a generator
                                                 in that state, which the call moves on by ``advance``
``upsample``                                     x, mode:str, (output size), align_corners:int, then per axis
                                                 scale:float (0: from the sizes) -> y
``upsample_backward``                            grad, (shape of x), then as ``upsample`` -> dx
``with_derivative``                              x, linear, of one type -> x; its gradient goes to linear alone
``ran``                                          x -> true, 0-d: keeps a call that may raise an error
``overwritten``                                  x, parameter:int, last:int -> x, the content of that parameter's memory
                                                 at this point; a backward reads the last content (last is 1)
``tangent``                                      y, function:int, output:int -> a placeholder for the gradient of y, an
                                                 output of a function with a user-defined gradient, until
                                                 ``differentiate`` knows it
``custom_gradient``                              count:int, ``count`` inputs, their gradients, tangents -> a tuple like
                                                 the tangents: its gradients are the gradients of the function's
                                                 outputs, and determine the inputs'; its values are never read
``collective``                                   x, does:str, undoes:str, axis:int, group:str -> x exchanged with the
                                                 other processes of a group: ``copy`` nothing, ``share`` divided by
                                                 their number, ``reduce`` the sum, ``gather`` all parts along the axis,
                                                 ``scatter`` the own part of the sum, ``slice`` the own part; its
                                                 gradient ``undoes``
``apply_opaque``                                 key:str, tensors.. -> tuple (results of a function of Python, arguments
                                                 that it has changed, a tensor that stands for its saved state)
``backward_opaque``                              key:str, that tensor, gradients of the results.. -> tuple of gradients
``given``                                        gradient, tangents.., gradients.. -> the gradient, with the tangents
                                                 replaced by the gradients; between two steps of ``differentiate``
``operator``                                     name:str, arguments:str, tensors.. -> the result (a tuple of them) of
                                                 the library's operator of that name; arguments is JSON
                                                 ``[args, kwargs, saved]`` in which ``{"$tensor": i}`` is the i-th
                                                 tensor, which may be a dynamic size as well, ``{"$complex": i}`` a
                                                 complex one of both parts, ``{"$real": i}`` one of a real part alone;
                                                 saved are the indices of the results that its derivative reads
``operator_vjp``                                 name:str, arguments:str, wanted:int, (outputs), tensors.., results..,
                                                 gradients.. -> gradient of tensor ``wanted``, given the results that
                                                 are saved and one gradient for each listed output; the library's own
                                                 derivative, computing the operator again
================================================ =======================================================================

A second result (``logsumexp``, ``positions``) is for the backward function only and has no gradient, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from autodiff.extents import Dim, Extent
from autodiff.ir import LIBRARY_PREFIX, Call, Constant, Expr, TensorType, TupleType

GENERATOR_STATE = (2,), "uint64"
"""Shape and type of a GPU's generator's state: seed and offset, given on the host. Nothing else is of this type."""


LEARNED = 2
"""``has_mask`` of an attention whose mask has a gradient."""


def call(name: str, args: Sequence[Expr], result: TensorType | TupleType) -> Call:
    """The call of library function ``library.<name>``; ``result`` is its type."""
    return relax.op.call_pure_packed(LIBRARY_PREFIX + name, *args, ty_args=result)


def number(size: Dim, element_type: str) -> Call | Constant:
    """A size as a 0-d tensor: a constant, or for an extent a call of ``library.extent``.

    The number is rounded to ``element_type`` as a constant is. It depends on no tensor, and so it has no gradient.
    """
    if isinstance(size, Extent):
        return call("extent", [relax.prim_value(size)], TensorType((), element_type))
    return relax.const(size, element_type)
