"""The private names of torch that are used: what each is for, and what is done where torch lacks it."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Name:
    """One name.

    Args:
        use: what it is for.
        without: what is done where torch lacks it; empty: nothing can be compiled, and all runs as PyTorch.
        quiet: whoever lacks it misses nothing.
    """
    use: str
    without: str = ""
    quiet: bool = False


ONE_SIZE = "programs are traced as torch does it: sizes of 0 and 1 get programs of their own"
OURS = "functions of torch that are traced as ours"
FEWER = "programs in which that occurs are cut in pieces, or run as PyTorch"
SLOW_TRACE = "traces take longer"
WRAPPED = "calls go through torch's own wrappers, which takes longer"
KEPT = "what was compiled is kept, also when its compiled object is gone, until torch._dynamo.reset()"
APART = "a train step runs as a forward, a backward and the optimiser's own step"
SHARED = "what is compiled of one function, or of objects of one class, may leave each other to PyTorch"
COLD = "each process traces its programs anew"
OPAQUE = "each saved tensor crosses from the forward to the backward by itself: memory is given back later"

FAKE = "torch._subclasses.fake_tensor."
RULES = "torch._subclasses.fake_impls."
GUARDS = "torch._C._dynamo.guards."
DYNAMO = "torch._dynamo."
SYMPY = "torch.utils._sympy."
TREE = "torch.utils._pytree."
AOT = "torch._functorch._aot_autograd."
SHAPES = "torch.fx.experimental.symbolic_shapes."

# Without one of these no program can be made, or none that would be right.
NEEDED = {
    **{f"{TREE}{name}": Name("nested arguments and results") for name in (
        "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten")},
    f"{DYNAMO}optimize": Name("captures the graph of a function"),
    "torch._functorch.aot_autograd": Name("takes a captured graph apart into operators"),
    f"{DYNAMO}config": Name("settings of the tracer"),
    f"{DYNAMO}types.ConvertFrameReturn": Name("lets one call run as PyTorch"),
    f"{DYNAMO}types.FrameAction": Name("lets one call run as PyTorch"),
    f"{DYNAMO}types.FrameExecStrategy": Name("lets one call run as PyTorch"),
    "torch._functorch.aot_autograd.aot_module_simplified": Name("takes a captured graph apart into operators"),
    "torch._functorch.partitioners.min_cut_rematerialization_partition": Name("cuts a joint graph into a forward and a "
                                                                             "backward"),
    "torch._guards.TracingContext": Name("what the trace that is going on knows"),
    f"{FAKE}FakeTensor": Name("the tensors of a trace"),
    f"{FAKE}FakeTensorMode": Name("the tensors of a trace"),
    f"{FAKE}unset_fake_temporarily": Name("real memory while a trace is going on"),
    f"{FAKE}DataDependentOutputException": Name("says that a result depends on the data"),
    f"{FAKE}DynamicOutputShapeException": Name("says that a result depends on the data"),
    f"{SYMPY}functions": Name("the formulas of sizes"),
    f"{SYMPY}reference.PythonReferenceAnalysis": Name("checks of sizes from the data"),
    f"{SYMPY}interp.sympy_interp": Name("checks of sizes from the data"),
    f"{SYMPY}numbers.is_infinite": Name("the formulas of sizes"),
    "torch._C._functorch.peek_interpreter_stack": Name("whether a transform of torch.func is going on"),
    "torch.autograd.forward_ad._current_level": Name("whether forward-mode differentiation is going on"),
    "torch.nn.modules.module._global_forward_hooks": Name("whether somebody watches every module"),
    "torch.nn.modules.module._global_forward_pre_hooks": Name("whether somebody watches every module"),
    "torch.nn.modules.module._global_backward_hooks": Name("whether somebody watches every module"),
    "torch.nn.modules.module._global_backward_pre_hooks": Name("whether somebody watches every module"),
    "torch._C._len_torch_dispatch_stack": Name("whether somebody watches every operator"),
    "torch.fx.graph._BoxedCodeGen": Name("runs a graph so that each value can go after its last use"),
    "torch.Tensor._version": Name("whether a tensor was changed in place"),
    "torch.UntypedStorage._cdata": Name("which tensors share memory"),
    "torch.ops.aten.add.Tensor._schema": Name("which operators write to their operands"),
    "torch._ops.HigherOrderOperator": Name("which functions of a graph have functions as operands"),
    "torch.ops.aten.add.Tensor._opname": Name("the names of operators"),
}

# Programs for all sizes, 0 and 1 included: all of these, or torch's own way of tracing.
ALL_SIZES = {path: Name("programs for all sizes, 0 and 1 included", ONE_SIZE) for path in (
    f"{DYNAMO}utils.run_node", "torch._subclasses.fake_impls", f"{RULES}_compute_slice_index",
    f"{RULES}op_implementations_dict", "torch.fx.experimental.proxy_tensor.proxy_call",
    "torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode",
    "torch.fx.experimental._config.backed_size_oblivious", "torch.fx.experimental.sym_node.SymNode",
    f"{SHAPES}make_symbol", f"{SHAPES}_static_eval_sym_bool", f"{SHAPES}_guard_or",
    f"{SHAPES}ShapeEnv._maybe_evaluate_static", f"{SYMPY}symbol.SymT", f"{SYMPY}functions.Max",
    f"{SYMPY}functions.Min", f"{SYMPY}functions.TruncToInt", "torch._C._select_conv_backend",
    "torch._C._current_graph_task_id")}

PYTHON_KERNELS = tuple(f"torch.ops.aten.dropout.default.{name}" for name in ("_dispatch_cache", "py_kernels"))

TRACING = {
    "torch.fx.experimental._config": Name("settings of symbolic sizes", ONE_SIZE),
    "torch._inductor.config": Name("random numbers that are drawn and not used", "the generator may stand elsewhere "
                                                                                "after a call than in eager PyTorch"),
    "torch._functorch.config": Name("settings of the partition", "graphs are cut as PyTorch cuts them"),
    f"{DYNAMO}convert_frame.compile_lock": Name("one thread traces at a time", "a lock of our own"),
    f"{DYNAMO}utils": Name("the graph's call in the code that torch makes of a frame", WRAPPED),
    f"{DYNAMO}symbolic_convert": Name("spares a trace to read source files", SLOW_TRACE),
    f"{DYNAMO}symbolic_convert.get_funcname": Name("spares a trace to read source files", SLOW_TRACE),
    **{f"{DYNAMO}symbolic_convert.{name}": Name("assertions about numbers from the data",
                                                "those that PyTorch's tracer loses are not checked") for name in (
        "_detect_and_normalize_assert_statement", "SymNodeVariable")},
    f"{DYNAMO}symbolic_convert.InstructionTranslator.current_tx": Name(
        "Ctrl-C that comes while torch.compile checks guards", "it is lost", quiet=True),
    f"{DYNAMO}guards": Name("spares a trace to time its guards", SLOW_TRACE),
    f"{DYNAMO}guards.profile_guard_manager": Name("spares a trace to time its guards", SLOW_TRACE, quiet=True),
    # torch 2.11 lacks one of these
    f"{DYNAMO}convert_frame": Name("parts after a graph break whose tensors are in objects", FEWER, quiet=True),
    f"{DYNAMO}convert_frame.has_tensor_in_frame": Name("parts after a graph break whose tensors are in objects", FEWER,
                                                       quiet=True),
    **{f"{DYNAMO}{name}": Name("holders of values that are traced as classes of the user's own", FEWER, quiet=True)
       for name in (
        "variables.UserDefinedClassVariable", "variables.ConstDictVariable", "variables.DunderDictVariable",
        "variables.VariableTracker", "variables.user_defined", "side_effects.SideEffects")},
    # written against torch 2.13
    **{f"{DYNAMO}{name}": Name("what calls modules under fully_shard in a loop", FEWER, quiet=True) for name in (
        "symbolic_convert.InstructionTranslatorBase", "variables.ListIteratorVariable", "variables.TupleVariable",
        "symbolic_convert.InstructionTranslatorBase.raise_loop_graph_break", "variables.iter.DictViewIterator",
        "variables.iter.ZipVariable", "variables.functions.unpack_iterable")},
    **{f"{DYNAMO}variables.{name}": Name("names of torch's own classes and functions", FEWER, quiet=True) for name in (
        "builtin.GetAttrBuiltinVariable", "builtin.GetAttrBuiltinVariable._call_getattr",
        "TorchInGraphFunctionVariable")},
    f"{DYNAMO}variables.constant.ConstantVariable": Name("messages that a program logs once", FEWER),
    f"{DYNAMO}variables.misc.LoggingLoggerVariable": Name("messages that a program logs once", FEWER),
    f"{DYNAMO}variables.misc.DebuggingVariable": Name("warnings in a function that is called", "they are not given"),
    f"{DYNAMO}variables.builder": Name("which sizes are traced as numbers", ONE_SIZE),
    f"{DYNAMO}variables.builder._automatic_dynamic": Name("which sizes are traced as numbers", ONE_SIZE),
    f"{DYNAMO}variables.builder.VariableBuilder._id_dispatch": Name(OURS, FEWER),
    f"{DYNAMO}variables.PolyfilledFunctionVariable": Name(OURS, FEWER),
    f"{DYNAMO}variables.PolyfilledFunctionVariable._get_polyfill_handlers": Name(OURS, FEWER),
    f"{DYNAMO}variables.TensorVariable": Name(OURS, FEWER),
    **{f"{DYNAMO}variables.{name}": Name("subscripts that are tensors without dims", FEWER) for name in (
        "builtin.BuiltinVariable", "builtin.BuiltinVariable.call_function",
        "TensorVariable.method___setitem__", "builder.wrap_fx_proxy", "SymNodeVariable")},
    f"{DYNAMO}guards.GuardBuilder": Name(OURS, FEWER),
    f"{DYNAMO}trace_rules.get_torch_obj_rule_map": Name(OURS, FEWER),
    f"{DYNAMO}trace_rules._polyfilled_function_ids": Name(OURS, FEWER),
    f"{DYNAMO}mark_static": Name("weights of a train step have fixed sizes", "their sizes are traced as symbols"),
    f"{FAKE}FakeTensorMode._dispatch_impl": Name("shapes of a trace are found once", SLOW_TRACE),
    f"{FAKE}in_kernel_invocation_manager": Name("shapes of a trace are found once", SLOW_TRACE),
    "torch._functorch.partitioners.optimization_hint": Name(
        "ranks of a step make the same program at any lengths", "before torch 2.13 their first batches are to be alike",
        quiet=True),
    "torch.library._impls": Name("kernels of operators that users replace", "compiled code does without these"),
    "torch.Tensor._is_zerotensor": Name("tensors of zeros without memory", "a call with one is refused"),
    "torch.Tensor._is_view": Name("shapes of a trace are found once", SLOW_TRACE),
    "torch._functionalize_unsafe_set": Name("shapes of a trace are found once", SLOW_TRACE),
    f"{SHAPES}_constrain_range_for_size": Name("sizes that are found in the data", FEWER),
    f"{SYMPY}interp.handlers": Name("floats that are computed from sizes", FEWER),
    f"{SYMPY}reference.TensorReferenceAnalysis": Name("floats that are computed from sizes", FEWER),
    f"{SYMPY}printers.PythonPrinter": Name("sizes as text in Python", "some programs are not made for all sizes"),
    "torch._C._exit_dual_level": Name("leaves a forward-mode level that a failed trace is in", "it is not left"),
    **{f"torch._tensor_str{name}": Name("the text of a tensor in the error of a trace",
                                       "after a trace of torch.func that failed no gradients may be computed")
       for name in ("", "._str")},
    "torch._C._functorch.maybe_current_level": Name("leaves a transform that a failed trace is in", "it is not left"),
    "torch._C._functorch.pop_dynamic_layer_stack": Name("leaves a transform that a failed trace is in",
                                                        "it is not left"),
    "torch.fx._lazy_graph_module._use_lazy_graph_module": Name("spares the text of graphs", SLOW_TRACE),
    "torch.fx._lazy_graph_module._make_graph_module": Name("spares the text of graphs", SLOW_TRACE),
    "torch.utils._python_dispatch._disable_current_modes": Name("whether a program serves sizes of 1", ONE_SIZE),
    "torch._C._nn": Name("whether a program serves sizes of 1", "it is found out more slowly"),
    "torch._C._DisableTorchDispatch": Name("whether a program serves sizes of 1", ONE_SIZE),
    "torch._decomp.decomposition_table": Name("results of some operators of two operands",
                                              "they may lie otherwise than in eager"),
    "torch._meta_registrations": Name("sizes of pooled results", "before torch 2.13 a program for each remainder",
                                      quiet=True),
    "torch._decomp.decompositions": Name("resizing to the nearest pixel", "some pixels are others than in eager"),
    "torch._decomp.get_decompositions": Name("operators that are taken apart", "they run as PyTorch"),
    "torch._decomp.core_aten_decompositions": Name("operators that are taken apart", "the table of torch.export"),
    "torch._C.DispatchKey.Autograd": Name("numbers drawn in place", "those drawn into permuted tensors are others than "
                                                                    "eager PyTorch's"),
    f"{AOT}runtime_wrappers._FirstInvocationContext": Name("first calls of complex operators", "they are as others",
                                                              quiet=True),
    "torch._higher_order_ops.associative_scan": Name(
        "an associative scan is one step for every length", "each length that is odd on the way is a program"),
    **{f"torch._higher_order_ops.effects.{name}": Name(
        "checks of matrices in programs", "before torch 2.13 a singular matrix is not refused", quiet=True)
       for name in ("_get_effect", "_register_effectful_op", "_EffectType.ORDERED")},
    "torch.amp.autocast_mode._enter_autocast": Name("autocast inside of a program", FEWER),
    "torch.amp.autocast_mode._exit_autocast": Name("autocast inside of a program", FEWER),
    "torch.nn._reduction.get_enum": Name("whether binary cross entropy is given probabilities", FEWER),
    "torch.nn._reduction.legacy_get_string": Name("size_average= and reduce= of losses", FEWER),
    "torch.fx.experimental.symbolic_shapes.has_static_value": Name("batch norm without a momentum", FEWER),
    "torch.nn.functional._verify_batch_size": Name("batch norm of one value", FEWER),
    "torch._C._nn.pad_sequence": Name("sequences that are padded", "a program for each order of their lengths"),
    "torch.distributions.kl._KL_REGISTRY": Name("divergences of distributions", FEWER),
    "torch.distributions.kl._dispatch_kl": Name("divergences of distributions", FEWER),
    "torch._check": Name("checks in functions that are traced as ours", FEWER),
    "torch._assert": Name("conditions of data that a program checks", "they cut the graph"),
    "torch._jit_internal._isinstance": Name("questions for the types of containers' elements", FEWER),
    "torch._assert_async": Name("checks in functions that are traced as ours", FEWER),
    **{f"torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default{name}": Name(
        "attention is no random operator", "programs that compute it again are cut in pieces, or run as PyTorch")
       for name in ("", "._tags", "._nondeterministic_seeded")},
    "torch._dispatch.python.enable_python_dispatcher": Name(
        "a strategy for models with recurrent layers or resizing", "they have none, or one for sizes that are numbers"),
    "torch.compiler._is_compiling_flag": Name(
        "a strategy for models with a way of their own for compilers", "they are searched by the way for eager"),
    **{path: Name("what operators do in traces", "a dropout that drops nothing gives a copy")
       for path in PYTHON_KERNELS},
    **{f"{DYNAMO}exc.{name}": Name("what the tracer raises", "all that it raises counts as a trace that failed")
       for name in ("BackendCompilerFailed", "InternalTorchDynamoError", "TorchRuntimeError", "Unsupported",
                    "UserError", "FailOnRecompileLimitHit", "UncapturedHigherOrderOpError")},
    f"{SHAPES}GuardOnDataDependentSymNode": Name(
        "what the tracer raises", "a step whose lists are indexed by the data raises it, too"),
    f"{DYNAMO}exc.SkipFrame": Name("errors of operators that the code catches", "such calls are traced anew"),
    **{f"{DYNAMO}exc.{name}": Name("a trace that begins again", FEWER)
       for name in ("TensorifyScalarRestartAnalysis", "RestartAnalysis")},
    **{path: Name("one tape for all that a backward needs", OPAQUE) for path in (
        "torch._library.fake_class_registry.FakeScriptObject", "torch._library.opaque_object.get_opaque_type_name",
        "torch._library.opaque_object.register_opaque_type", "torch._opaque_base.OpaqueBase")},
    **{path: Name("tracing in a thread of its own", "background=True traces in the caller's thread") for path in (
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack", "torch._C._len_torch_function_stack",
        "torch.fx._symbolic_trace._Patcher", "torch.fx._symbolic_trace._Patcher.patch_method",
        "torch.fx._symbolic_trace.is_fx_symbolic_tracing")},
}

CALLS = {
    "torch.distributed.distributed_c10d._get_default_store": Name(
        "what a failing rank has said", "the others say that it is lost, without its words", quiet=True),
    f"{DYNAMO}eval_frame._debug_get_cache_entry_list": Name("calls without torch's wrappers", WRAPPED),
    f"{GUARDS}RootGuardManager.add_epilogue_lambda_guard": Name("programs for all sizes, of parts between graph breaks",
                                                                ONE_SIZE),
    f"{DYNAMO}eval_frame.always_optimize_code_objects": Name("a code object for each compiled object", SHARED),
    "torch.nn.Module._call_impl": Name("a code object for each compiled module", SHARED),
    f"{DYNAMO}external_utils.wrap_inline": Name("modules of torch's own under fully_shard", FEWER, quiet=True),
    f"{DYNAMO}trace_rules.check": Name("spares frames that are not traced the settings of a trace",
                                       f"{SLOW_TRACE}; background=True traces them too"),
    f"{DYNAMO}eval_frame.cached_backends": Name("lets go of what was compiled", KEPT),
    f"{DYNAMO}guards.GuardManagerWrapper": Name("lets go of what was compiled", KEPT),
    f"{DYNAMO}guards.DeletedGuardManagerWrapper": Name("lets go of what was compiled", KEPT),
    f"{DYNAMO}utils.CleanupManager.instance": Name("lets go of what was compiled", KEPT),
    f"{SHAPES}ShapeEnv": Name("lets go of what a trace knew about sizes", KEPT),
    f"{DYNAMO}eval_frame.skip_code": Name("threads that capture at once", "such a thread may run its call as PyTorch"),
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": Name(
        "backwards that Dynamo leaves as they are", "each backward takes some microseconds longer"),
    f"{DYNAMO}eval_frame._optimize": Name("whether programs of one compilation are kept apart", "as before torch 2.12"),
    f"{DYNAMO}eval_frame": Name("calls without torch's wrappers", WRAPPED),
    f"{DYNAMO}eval_frame._stance": Name("calls without torch's wrappers", WRAPPED),
    f"{DYNAMO}eval_frame.DynamoStance": Name("calls without torch's wrappers", WRAPPED),
    "torch._C._dynamo.eval_frame.get_eval_frame_callback": Name("calls without torch's wrappers", WRAPPED),
    "torch._C._is_tracing": Name("calls without torch's wrappers", WRAPPED),
    "torch._guards._TLS": Name("calls without torch's wrappers", WRAPPED),
    "torch.autograd.profiler._is_profiler_enabled": Name("calls without torch's wrappers", WRAPPED),
    f"{AOT}runtime_wrappers.coerce_to_expected_memory_format": Name("gradients without torch's wrappers", WRAPPED),
    f"{AOT}runtime_wrappers.AOTDispatchAutograd": Name("gradients without torch's wrappers", WRAPPED),
    f"{AOT}utils.top_saved_tensors_hooks": Name("gradients without torch's wrappers", WRAPPED),
    "torch._C._is_any_autocast_enabled": Name("calls without torch's wrappers", WRAPPED),
    "torch._C._is_key_in_tls": Name("context variables in a backward", "a backward does not see the caller's"),
    "torch._C._get_obj_in_tls": Name("context variables in a backward", "a backward does not see the caller's"),
    "torch._C._autograd._get_current_graph_task_keep_graph": Name("memory of a backward that runs once",
                                                                  "it is given back when its tape goes"),
    "torch._C._set_grad_enabled": Name("switches gradients off", "torch.set_grad_enabled, which takes longer"),
    f"{GUARDS}_empty_strided_cpu": Name("allocates results", "torch.empty_strided, which takes longer"),
    f"{GUARDS}_empty_strided_cuda": Name("allocates results on a GPU", "torch.empty_strided, which takes longer", True),
    "torch._C._cuda_getCurrentRawStream": Name("the stream of a GPU that work goes to",
                                               "torch.cuda.current_stream, which takes longer", True),
    f"{GUARDS}TensorGuards": Name("whether a call's tensors are those of the last", "each call is bound anew"),
    "torch.ops.mkldnn._reorder_convolution_weight.default": Name("weights of convolutions in the library's order",
                                                                 "it reorders them at each call"),
    "torch.ops.mkldnn._convolution_pointwise.default": Name("weights of convolutions in the library's order",
                                                            "it reorders them at each call"),
    "torch._C._profiler._ExperimentalConfig": Name("counts what PyTorch allocates, for reports", "nothing is counted"),
    "torch._C._profiler": Name("counts what PyTorch allocates, for reports", "nothing is counted"),
    "torch._C._autograd._enable_profiler_legacy": Name("counts what PyTorch allocates, for reports",
                                                       "nothing is counted"),
    "torch._C._autograd._disable_profiler_legacy": Name("counts what PyTorch allocates, for reports",
                                                        "nothing is counted"),
}

DDP = {"torch._dynamo.utils.counters": Name(
    "parts of a model under DistributedDataParallel, by torch.compile",
    "such parts run as PyTorch; anyshape.compile compiles the model as one", quiet=True)}

TRAIN_STEP = {path: Name("a whole train step as one program", APART) for path in (
    "torch._guards.tracing", "torch._amp_update_scale_", "torch.amp.GradScaler._lazy_init_scale_growth_tracker",
    "torch.optim.optimizer._global_optimizer_pre_hooks", "torch.optim.optimizer._global_optimizer_post_hooks",
    "torch.Tensor._backward_hooks", "torch.Tensor._post_accumulate_grad_hooks")}

WARM_START = {path: Name("programs that a second process takes from the cache", COLD) for path in (
    f"{DYNAMO}convert_frame", f"{DYNAMO}convert_frame.orig_code_map", f"{DYNAMO}convert_frame.output_codes",
    f"{DYNAMO}guards.CheckFunctionManager", f"{DYNAMO}guards.CheckFunctionManager.build_guards",
    f"{DYNAMO}guards.CheckFunctionManager.compile_check_fn", f"{DYNAMO}guards.CheckFunctionManager.id_ref",
    f"{DYNAMO}output_graph.OutputGraphCommon", f"{DYNAMO}output_graph.OutputGraphGuardsState",
    f"{DYNAMO}types.GuardedCode", f"{DYNAMO}types.wrap_guarded_code", f"{DYNAMO}utils.CleanupHook",
    f"{DYNAMO}bytecode_transformation._unique_id_counter", "torch._guards.GuardsSet", "torch._guards.CompileId",
    f"{DYNAMO}variables.functions", f"{DYNAMO}variables.functions.invoke_and_store_as_constant",
    f"{DYNAMO}variables.nn_module", "torch._logging.trace_structured",
    "torch.overrides._get_current_function_mode_stack", "torch.utils._device", "torch.utils._ordered_set.OrderedSet")}

NAMES: dict[str, Name] = {**NEEDED, **ALL_SIZES, **TRACING, **CALLS, **DDP, **TRAIN_STEP, **WARM_START}
