"""All names that are private of torch, under public ones: what a new version of torch may break is here.

What takes a second to import is in files of its own, `aot` and `inductor`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._C import DisableTorchFunction, DispatchKey, FunctionSchema
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
from torch._C._distributed_c10d import FileStore, PrefixStore
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._C._nn import _parse_to as parse_to
from torch._decomp import decomposition_table as torch_decompositions
from torch._decomp import decompositions
from torch._dispatch.python import no_python_dispatcher
from torch._export.utils import _collect_all_valid_cia_ops_for_aten_namespace as composite_operators
from torch._higher_order_ops.effects import with_effects
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._prims_common import is_non_overlapping_and_dense_or_false, suggest_memory_format
from torch._subclasses import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules._functions import BackwardHookFunction
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

# The names of modules, which are not there before something is compiled.
DYNAMO, FUNCTORCH, INDUCTOR = "torch._dynamo", "torch._functorch", "torch._inductor"
# Where a module holds what is registered in it: keys of its `__dict__`.
BUFFERS, MODULES, PARAMETERS = "_buffers", "_modules", "_parameters"
# Where a scheduler has the schedulers that it is made of.
SCHEDULERS = "_schedulers"
# Where a module that torch.compile returns has the one that it was given.
COMPILED = "_orig_mod"
# Where a function that torch.compile returns has the one that it was given.
PLAIN_FUNCTION = "_torchdynamo_orig_callable"
# What an optimizer has in its `__dict__` after a step under a learning-rate scheduler.
STEPPED = {"_opt_called": True}
# What tracing replaces by these names: in `torch`, in `decompositions`, in `torch.utils.checkpoint` (there a prefix).
CHECK_TENSOR, RNN_HELPER = "_check_tensor_all_with", "_rnn_helper"
CHECKPOINT_GENERATOR = "_checkpoint_without_reentrant_generator"

# The operator that `torch.distributed.pipelining.pipe_split` calls; it computes nothing.
MARK = "_pipe_split"

UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)
"""What torch raises where a traced tensor is asked for its values, or where a shape depends on them."""
Decompositions = dict[OpOverload, Callable[..., Any]]

amp_update_scale_, unscale_and_check_ = torch._amp_update_scale_, torch._amp_foreach_non_finite_check_and_unscale_
foreach_add_, foreach_copy_, foreach_sub_ = torch._foreach_add_, torch._foreach_copy_, torch._foreach_sub_
foreach_addcdiv_, foreach_div_, foreach_neg_ = torch._foreach_addcdiv_, torch._foreach_div_, torch._foreach_neg_
foreach_norm, foreach_sqrt, foreach_sub = torch._foreach_norm, torch._foreach_sqrt, torch._foreach_sub
is_functional_tensor = torch._is_functional_tensor
compiling = functools.partial(mock.patch.object, torch.compiler, "_is_compiling_flag", True)
"""Inside, `torch.compiler.is_compiling()`. torch.export does it like this; torch 2.11 has no context for it yet."""
make_fx_with_constants = functools.partial(make_fx, _allow_non_fake_inputs=True)
rename: Callable[[fx.Node, str], None] = fx.Node._rename  # with a number, if the name is taken
register_namedtuple = pytree._register_namedtuple
run_backward = torch.autograd.Variable._execution_engine.run_backward
set_data = vars(torch._C.TensorBase)["data"].__set__  # `x.data = y`, as a torch function mode sees it

has_bfloat16: Callable[[], bool] = torch.ops.mkldnn._is_mkldnn_bf16_supported  # whether oneDNN computes in it here
backward_hooks: Callable[[Tensor | nn.Module], dict[int, Callable[..., Any]] | None] = attrgetter("_backward_hooks")
backward_pre_hooks: Callable[[nn.Module], dict[int, Any]] = attrgetter("_backward_pre_hooks")
accumulated_hooks: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_post_accumulate_grad_hooks")
step_hooks: Callable[[Any], tuple[Any, Any]] = attrgetter("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
dispatch_cache: Callable[[OpOverload], dict[Any, Any]] = attrgetter("_dispatch_cache")
initial_function: Callable[[Any], Callable[..., Any]] = attrgetter("_init_fn")  # of a torch.library.custom_op
is_tensor_view: Callable[[Tensor], bool] = Tensor._is_view
schema_of: Callable[[Any], FunctionSchema] = attrgetter("_schema")
validates_args: Callable[[type[torch.distributions.Distribution]], bool] = attrgetter("_validate_args")
version_of: Callable[[Tensor], int] = attrgetter("_version")  # how often it was written into
written_as: Callable[[Any], type] = attrgetter("_forward_cls")  # the autograd.Function of a class of graph nodes


class LightDispatchMode(TorchDispatchMode):
    """Does not keep torch's compiler away from what it calls, which would load it, and that takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def autograd_in_kernel() -> AbstractContextManager[None]:
    """Inside, kernels of a torch.library.custom_op, and decompositions, may differentiate what they compute."""
    without = torch._C._dispatch_tls_local_exclude_set()
    for key in (DispatchKey.AutogradFunctionality, DispatchKey.AutogradOther, DispatchKey.AutogradNestedTensor):
        without = without.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), without)


def memory_of(tensor: Tensor) -> int:
    """The address of the record of a tensor's storage, which its views share; also where it has no values."""
    return tensor.untyped_storage()._cdata


def shared_memory(size: int, device: torch.device) -> tuple[Tensor, Any]:
    """Bytes of a CUDA device, and what opens them in another process as long as they are here."""
    with _fixed_segments():
        memory = torch.empty(size, dtype=torch.uint8, device=device)
    return memory, memory.untyped_storage()._share_cuda_()


@contextmanager
def _fixed_segments() -> Iterator[None]:
    """Inside, CUDA's allocator has no expandable segments: many systems do not let another process open one."""
    environment = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF", "")
    read: Callable[[], str] = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: environment)  # not in 2.11
    before, change = read(), torch._C._accelerator_setAllocatorSettings
    # What a text does not name gets torch's default, so it goes back as a whole.
    inside = before.replace(" ", "").replace("expandable_segments:True", "expandable_segments:False")
    if inside == before:
        yield
        return
    change(inside)
    try:
        yield
    finally:
        change(before)


def opened_memory(opens: Any, device: torch.device) -> Tensor:
    """Bytes that another process has shared, as `device` reaches them; they may be another device's."""
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *opens[1:])
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def operator_name(target: object, otherwise: str = "") -> str:
    """`add` of `aten.add.Tensor`; `otherwise` of what is no operator."""
    return str(getattr(target, "_opname", otherwise))


def held_by(tensor: FunctionalTensor) -> Tensor:
    """What a functional tensor holds now: another object once it was written into."""
    torch._sync(tensor)  # type: ignore[attr-defined]
    return torch._from_functional_tensor(tensor.elem)


def append_copy(graph: fx.Graph, node: fx.Node, argument: Callable[[fx.Node], Any]) -> fx.Node:
    """`graph.node_copy(node, argument)` at a graph's end, without its slow search for symbolic numbers."""
    namespace, args, kwargs = graph._graph_namespace, fx.map_arg(node.args, argument), fx.map_arg(node.kwargs, argument)
    copy = fx.Node(graph, namespace.create_name(node.name, None), node.op, node.target, args, kwargs, node.type)
    namespace.associate_name_with_obj(copy.name, copy)
    graph._root.prepend(copy)
    graph._find_nodes_lookup_table.insert(copy)
    graph._len += 1
    copy.meta.update(node.meta)
    return copy


def made_functional(tensor: FakeTensor) -> Tensor:
    """A tensor as the trace sees what it computes itself, if it makes calls in place functional; else the tensor."""
    active = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    return tensor if active is None else FunctionalTensor.to_functional(tensor)


@functools.cache
def onnx_operators() -> frozenset[Any]:
    """What torch.onnx translates."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    return frozenset(found[0].fx_target for found in ONNXRegistry.from_torchlib().functions.values())
