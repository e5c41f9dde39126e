"""Private names of torch: the one list of those that are used, each with what is done where torch lacks it.

    guards = compat.get("torch._C._dynamo.guards.TensorGuards")      None: take the slower, public way
    partition = compat.need("torch._functorch.partitioners.min_cut_rematerialization_partition")

Nobody else imports a name of torch that begins with an underscore (tests/test_house.py).
"""
from anyshape.torch_compat.access import (
    Absent,
    TorchVersionWarning,
    bind,
    get,
    has,
    is_there,
    lack,
    lacking,
    need,
    pretending,
    refusal,
    version,
)
from anyshape.torch_compat.names import ALL_SIZES, PYTHON_KERNELS, TRAIN_STEP
from anyshape.torch_compat.objects import (
    OpOverload,
    OpOverloadPacket,
    arity,
    aten,
    compile_lock,
    gives_view,
    is_mutable,
    is_zeros,
    operator_name,
    python_kernels,
    schema_text,
    storage_id,
)

__all__ = ["ALL_SIZES", "Absent", "OpOverload", "OpOverloadPacket", "PYTHON_KERNELS", "TRAIN_STEP",
           "TorchVersionWarning", "arity", "aten", "bind", "compile_lock", "get", "gives_view", "has", "is_mutable",
           "is_there", "is_zeros", "lack", "lacking", "need", "operator_name", "pretending", "python_kernels",
           "refusal", "schema_text", "storage_id", "version"]
