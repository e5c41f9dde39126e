"""The functions and methods of torch that are replaced while a program is traced (monkey patches), each with the reason
why it cannot be done otherwise. Not among them: settings, which torch's own `config.patch` changes, and entries of
torch's tables (Python kernels of operators: torch_compat/versions/python_kernels.py; tags:
torch_compat/versions/side_effects.py; rules of shapes: `shape_rules` in torch_compat/tracing/settings.py).

They are there from the beginning of a trace to its end, also where it ends with an error or Ctrl-C, under torch's own
lock for compilations (`compile_lock`): another thread that compiles waits, as it would for any other compilation. What
threads ask that do not compile is meant to stay as it is: tests/test_patches.py tries random numbers and calls of what
is compiled there, and that all is undone.
"""
from __future__ import annotations

NODE = "torch.fx.experimental.sym_node.SymNode."
SHAPES = "torch.fx.experimental.symbolic_shapes."
VARIABLES = "torch._dynamo.variables."
SYMPY = "torch.utils._sympy.reference.TensorReferenceAnalysis."

AGAIN = "the same sums of sizes are asked for thousands of times, and torch remembers none"
GENERAL = "an operator asks whether a size is 0 or 1: a setting makes that a guard or an error, and neither serves all"
FLOATS = "torch's pass over floats fails where it lacks one of sympy's functions; with this it leaves the float alone"
HOLDERS = "Dynamo has no interface for classes of users that hold data: it ends the graph at them"
BESIDE = "Dynamo saves and restores it for all threads, and only one traces"

WHILE_TRACING = {
    **{NODE + name: AGAIN for name in ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_",
                                       "sym_max", "sym_min", "wrap_int", "maybe_as_int")},
    SHAPES + "PropagateUnbackedSymInts.run": "says where a pass over the program begins: what was remembered goes",
    "torch._subclasses.fake_tensor.FakeTensorMode._dispatch_impl":
        "shapes of repeated operators: torch's own cache costs more than the rule where sizes are symbols",
    "torch._dynamo.symbolic_convert.get_funcname": "reads and tokenizes source files for a log that nobody writes",
    "torch._dynamo.symbolic_convert._detect_and_normalize_assert_statement":
        "an assertion about a number from the data is taken for a fact, and its check is lost",
    "torch._dynamo.convert_frame.CheckFunctionManager":
        "records guards for the next process: torch's own serialisation has none of functions, classes and modules",
    "torch._dynamo.guards.profile_guard_manager": "times the guards with empty caches (20 ms), for a log, too",
    **{NODE + name: GENERAL for name in ("guard_bool", "expect_true", "mod")},
    **{SHAPES + name: GENERAL for name in ("_guard_or", "_static_eval_sym_bool")},
    SHAPES + "make_symbol": "torch's symbols of sizes are positive; 0 is a size, too",
    "torch._dynamo.utils.run_node": "says whether Python of the user asks a size, or an operator",
    "torch.fx.experimental.proxy_tensor.proxy_call": "the same for the trace of torch.export",
    "torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode.__torch_function__":
        "the same for methods in torch.export that ask before they are operators",
    "torch.export.exported_program.ExportedProgram.run_decompositions": "the same for its decompositions",
    "torch._functorch.aot_autograd.aot_module_simplified": "the same for the backward's trace",
    "torch._C._select_conv_backend": "asks sizes for a layout: its answer changes no result, and is no guard",
    "torch.backends.opt_einsum.get_opt_einsum": "an einsum of three takes sizes as numbers to choose its path",
    "torch._subclasses.fake_impls._compute_slice_index": "a bound of a slice of unknown sign ends the graph",
    "torch._meta_registrations.div_rtn": "a pool asks for a remainder of its sizes before torch 2.13, which guards it",
    "torch._decomp.decompositions._compute_upsample_nearest_indices":
        "takes other pixels than eager where a factor is no whole number; 18 operators share it",
    VARIABLES + "builder._automatic_dynamic":
        "chooses sizes that are taken as numbers, one by one; torch's marks would stay on the user's tensors",
    "torch._dynamo.symbolic_convert.InstructionTranslatorBase.raise_loop_graph_break":
        "leaves a frame to PyTorch that calls modules under fully_shard in a loop",
    VARIABLES + "iter.DictViewIterator.reconstruct": "a loop over modules that is cut: Dynamo has no rule for it",
    VARIABLES + "iter.ZipVariable.reconstruct": "the same, over several at once",
    VARIABLES + "misc.LoggingLoggerVariable.call_method": "warning_once ends a graph",
    VARIABLES + "misc.DebuggingVariable.call_function": "warnings of inner functions are lost",
    SHAPES + "ShapeEnv.produce_guards_verbose": "writes a guard `0 <= size` for each size, which is asked in Python",
    **{SYMPY + name: FLOATS for name in ("expr_cond_pair", "identity", "is_non_overlapping_and_dense_indicator",
                                         "modular_indexing", "piecewise", "python_mod", "trunc", "where")},
    "torch._dynamo.side_effects.SideEffects.cls_supports_mutation_side_effects": HOLDERS,
    "torch._dynamo.convert_frame.has_tensor_in_frame":
        "after a graph break it looks for tensors in lists, tuples and dictionaries, not in objects of users",
    VARIABLES + "dicts.DunderDictVariable.create": HOLDERS,
    VARIABLES + "builtin.BuiltinVariable.call_function":
        "takes the value of a tensor that is a subscript, or compared with a size, for a constant, or ends there",
    VARIABLES + "builtin.GetAttrBuiltinVariable._call_getattr":
        "names of torch's own classes and functions end a graph; those of others are constants",
    VARIABLES + "tensor.TensorVariable.method___setitem__": "the same, where something is written there",
    VARIABLES + "tensor.TensorVariable.call_method": "methods of tensors that end a graph are traced as our functions",
    VARIABLES + "user_defined.UserDefinedClassVariable.call_function": HOLDERS,
    VARIABLES + "user_defined.UserDefinedClassVariable.supported_c_new_functions": HOLDERS,
    VARIABLES + "user_defined.is_standard_setattr": HOLDERS,
    "torch._functorch._aot_autograd.runtime_wrappers._FirstInvocationContext.__init__":
        "runs a first call under a mode in which some operators forget that an operand is conjugated",
    "torch._tensor_str._str": "keeps a guard of the dispatcher in a traceback, which turns gradients off when it goes",
    "torch.fx._symbolic_trace._Patcher.patch_method": "torch.fx stands in for the calls of all modules while it traces",
    "torch.fx._symbolic_trace.is_fx_symbolic_tracing":
        "says to all threads that torch.fx traces; torch.compile would refuse to run in the others",
}

WHILE_TRACING_BESIDE = {
    "torch.random.set_rng_state": f"the generator's state: {BESIDE}; draws of the others would come twice",
    "torch.compiler._compile_session_context": f"the flag that torch compiles: {BESIDE}",
}

BY_TORCH = {"torch.fx.graph_module._forward_from_src": "Dynamo's own, in every trace"}
