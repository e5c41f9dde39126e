"""Known bugs of PyTorch and the libraries under it, each with its workaround: `FAULTS`, from which
docs/upstream-bugs.md is made."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A bug of others.

    Args:
        name: of the check in tests/test_upstream.py, where `checked`.
        where: Dynamo, decompositions (of torch), eager PyTorch, oneDNN, LLVM; since: the first version seen with it.
        symptom: what goes wrong; workaround: what is done here, with the file; "" where eager is followed or nothing
            is done.
        checked: the check passes while the bug is there, and fails where it is gone: then the workaround can go.
            Others say in `fixed` how to see that.
        mended: the first version without it; the workaround goes with the last version before that.
    """
    name: str
    where: str
    since: str
    symptom: str
    workaround: str = ""
    fixed: str = ""
    checked: bool = True
    mended: str = ""


DYNAMO, TAKEN_APART, EAGER, ONEDNN, LLVM = "Dynamo", "decompositions", "eager PyTorch", "oneDNN", "LLVM"
_TABLE = "`frontend/aten/decompositions.py`"
_TRACED = "`frontend/capture/traceable_functions.py` traces another form"
_RULES = "`frontend/capture/meta_kernels.py` has a rule"

FAULTS = (
    Fault("division of sizes", DYNAMO, "2.13", "`float(torch.ops.aten.div(int(a), int(b)))` of tensors is NaN where "
          "scalars are captured", "`torch_compat/tracing/fake_tensor_cache.py` forgets the constant"),
    Fault("first call under a mode", DYNAMO, "2.13", "AOTAutograd runs a first call under a dispatch mode, in which "
          "`linalg.pinv` of complex numbers is wrong", "`torch_compat/versions/api.py` has no such call"),
    Fault("layout of one_hot", DYNAMO, "2.13", "`one_hot` lies as its operand does", _TRACED),
    Fault("callback that raised", DYNAMO, "2.13", "loses count of what it calls to trace a frame when that raises, and "
          "of code after a graph break: they never die", "`torch_compat/dynamo/internals.py` empties them",
          "`Callback.clear` removed, tests/test_release.py passes", checked=False),
    Fault("code that is left", DYNAMO, "2.13", "what one `torch.compile` leaves to PyTorch (a graph break in a loop), "
          "each later one of the same code leaves too", "`torch_compat/dynamo/copied_target.py` copies code objects",
          "`copy_of` returns its argument, tests/test_shared_code.py passes", checked=False),
    Fault("exceptions in guards", DYNAMO, "2.13", "C++ clears what a guard that is written in Python raises, Ctrl-C "
          "too, and takes the guard not to hold", "`frontend/capture/fast_dispatch.py` and "
          "`torch_compat/dynamo/internals.py` ask again", "`_lost_interrupt` returns False, "
          "tests/test_fast_dispatch.py passes", checked=False),
    Fault("sizes of **keywords", DYNAMO, "2.13", "`torch.export` refuses `dynamic_shapes` of arguments that only "
          "**keywords take", "`frontend/capture/export_called.py` gives the module a signature with names",
          "`_with_names` returns its argument, tests/test_deploy_modules.py passes", checked=False),
    Fault("guards of nested tensors", DYNAMO, "2.13", "guards ask nested tensors for strides, which ends the process",
          "`frontend/callables/compiled_callable.py` looks for them before the call", "a compiled function that is "
          "called with a nested tensor after a padded one returns", checked=False),
    Fault("text of a tensor in a transform", EAGER, "2.13", "where `str` of a tensor of torch.func fails, the error's "
          "traceback keeps a guard of the dispatcher; when it is collected, no gradients are computed in the thread "
          "any more (Dynamo's trace of `vmap(hessian(f))`)", "`torch_compat/tracing/settings.py` empties the "
          "traceback; not under `torch.compile(backend=\"anyshape\")`", "tests/test_hostile.py passes without "
          "`_no_guard_in_a_traceback`", checked=False),
    Fault("assertion without a message", DYNAMO, "2.13", "`torch._assert_async` without a message is dropped", _TRACED,
          "its row in `IN_PYTHON` removed, tests/test_data.py passes", checked=False),
    Fault("order of addcdiv", DYNAMO, "2.13", "`addcdiv` with a `value` multiplies the quotient by it, where the "
          "operator multiplies the numerator", _TRACED, "its row in `IN_PYTHON` removed, tests/test_edges.py passes",
          checked=False),
    Fault("gradient of fake quantisation", DYNAMO, "2.13", "that of `fake_quantize_per_channel_affine` takes no sizes "
          "that are symbols", _TRACED, "its row in `IN_PYTHON` removed, tests/test_data.py passes", checked=False),
    Fault("targets after -1", TAKEN_APART, "2.13", "`multilabel_margin_loss` counts what is behind the -1 that ends "
          "the targets", _TRACED),
    Fault("NaN in margin losses", TAKEN_APART, "2.13", "`multi_margin_loss` is NaN where one score is; the operator "
          "leaves it out", _TRACED),
    Fault("probabilities", TAKEN_APART, "2.13", "`binary_cross_entropy` takes what is no probability; the operator "
          "refuses it", _TRACED),
    Fault("select_scatter out of range", TAKEN_APART, "2.13", "`select_scatter` at an index out of range changes "
          "nothing; the operator refuses it", _TRACED),
    Fault("pixels of upsample_nearest", TAKEN_APART, "2.13", "other pixels than eager's, or an index out of range, "
          "where a factor is no whole number", "`torch_compat/versions/python_kernels.py` finds the pixels"),
    Fault("gradient of softshrink", TAKEN_APART, "2.13", "NaN where the operator's gradient is 0 and what comes from "
          "behind is infinite", "`torch_compat/versions/python_kernels.py` has a form of its own"),
    Fault("dtype of threshold_backward", TAKEN_APART, "2.13", "has the dtype of what comes from behind, also of whole "
          "numbers", _TABLE),
    Fault("logit of half precision", TAKEN_APART, "2.13", "`logit(1, eps=1e-6)` in half precision is finite, where "
          "eager's is infinite", f"{_TABLE}: stays whole"),
    Fault("losses of nothing", TAKEN_APART, "2.13", "gradients of `mse_loss`, `smooth_l1_loss` and `huber_loss` divide "
          "by a number of elements of 0 in Python", _TABLE),
    Fault("group_norm of nothing", TAKEN_APART, "2.13", "the gradient divides by 0 in Python", _TABLE),
    Fault("NaN in smooth_l1_loss", TAKEN_APART, "2.13", "the gradient of NaN is 0", _TABLE),
    Fault("deviations of great numbers", TAKEN_APART, "2.13", "`std` of numbers beyond 1e19 is infinite in float32; "
          "the operator adds in float64", f"{_TABLE}: stays whole; `frontend/aten/reduce.py` adds in float64"),
    Fault("layouts of two operands", TAKEN_APART, "2.13", "`heaviside`, `logaddexp`, `logaddexp2`, `xlogy` and "
          "`xlog1py` lay the result out by one operand", f"{_TABLE}: stay whole; {_RULES}"),
    Fault("layouts of batch norms", TAKEN_APART, "2.13", "a result lies as a permuted operand does, where the "
          "operator's is in order: `view` is refused", f"{_TABLE}; {_RULES}"),
    Fault("layout of logsigmoid", TAKEN_APART, "2.13", "a result lies as its operand does", f"{_TABLE}; {_RULES}"),
    Fault("channels last", TAKEN_APART, "2.13", "`channel_shuffle` and `max_unpool2d` of channels last are in order",
          f"{_TABLE}; {_RULES}"),
    Fault("dtypes of indices", TAKEN_APART, "2.12", "rules for shapes take indices of dtypes that `index_select`, "
          "`index_add`, `index_copy`, `index_fill` and `index_put` refuse", _RULES),
    Fault("dtypes of an embedding's indices", TAKEN_APART, "2.12", "the rule for shapes takes indices of dtypes that "
          "`embedding` refuses", _RULES, mended="2.13"),
    Fault("largest of nothing", TAKEN_APART, "2.12", "rules for shapes of `max` and `min` have a result for a dim "
          "without elements, which the operators refuse", _RULES),
    Fault("nearest pixels of an empty batch", TAKEN_APART, "2.12", "the rule for the shape of `upsample_nearest` takes "
          "a product of sizes for a truth value, and refuses an empty batch", _RULES),
    Fault("check of singular matrices", DYNAMO, "2.12", "dead code elimination takes out `_linalg_check_errors`: a "
          "singular matrix is not refused", "`torch_compat/versions/side_effects.py` says that it has an effect",
          mended="2.13"),
    Fault("dtype of attention's sums", TAKEN_APART, "2.12", "the rule for "
          "`_scaled_dot_product_flash_attention_for_cpu` has sums of float32 where those of float64 are float64",
          "`torch_compat/versions/python_kernels.py` has a rule", mended="2.13"),
    Fault("frac of -0.0", TAKEN_APART, "2.12", "`frac(-0.0)` is -0.0, where the operator gives 0.0",
          f"{_TABLE}: stays whole", mended="2.13"),
    Fault("bags of bfloat16", TAKEN_APART, "2.13", "the rule for the shape of `_embedding_bag`'s second result is not "
          "what the operator gives for bfloat16", _TABLE),
    Fault("gelu of infinity", EAGER, "2.13", "`gelu(inf)` is NaN in dense vectors, inf elsewhere", "inf everywhere"),
    Fault("one bound of NaN", EAGER, "2.11", "`clamp` by one number that is NaN leaves its operand as it is; "
          "`clamp_min` and `clamp` by two give NaN", "`frontend/aten/pointwise.py` leaves it to PyTorch",
          mended="2.12"),
    Fault("gradient of hardsigmoid", EAGER, "2.13", "the sixth in float64 is that of float32",
          "not compared (tests/test_edges.py)"),
    Fault("addmv of nothing", EAGER, "2.13", "`addmv` of whole numbers and a matrix without rows has the shape of "
          "what is added"),
    Fault("pixel_unshuffle of nothing", EAGER, "2.13", "the result has the shape of the operand"),
    Fault("gradient of batch norms", EAGER, "2.13", "that of the input is wrong where what comes from behind lies as "
          "channels last but for its first stride, as that of `flatten(2).transpose(1, 2)` in a batch of one does",
          "the batch norm is taken apart"),
    Fault("convolutions with channels last", ONEDNN, "2.13", "in bfloat16 over volumes, dilated, transposed, or in "
          "groups of few channels: wrong at some sizes",
          "`runtime/torch_ops/onednn_workarounds.py` gives operands in order",
          "tests/test_convolution.py with `right_with_channels_last` always true", checked=False),
    Fault("scratch of convolutions", ONEDNN, "2.13", "half precision with AMX reads memory that nothing was written to",
          "`runtime/torch_ops/onednn_workarounds.py` computes in float32",
          "tests/test_convolution.py with `right_in_half` always true, on a "
          "processor with AMX", checked=False),
    Fault("gradient of weights without a window", ONEDNN, "2.13", "with strides and fewer than 16 channels that are "
          "last writes beyond its memory, which ends the process",
          "`runtime/torch_ops/onednn_workarounds.py` makes the copy",
          "an image of 3 channels and 128 x 160 pixels with a window of 1 and strides of 2, in a process of its own",
          checked=False),
    Fault("far constants", LLVM, "llvmlite 0.50", "the older linker (RTDyld) ends the process where code and constants "
          "are 2 GB apart", "`backend/cpu/llvm/jit.py` links with JITLink", "none needed: JITLink is the newer linker",
          checked=False),
)
