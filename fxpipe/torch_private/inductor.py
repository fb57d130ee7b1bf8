"""Torch's inductor: what compiles a graph, and what fxpipe changes in it meanwhile."""

from torch._functorch import config as functorch_config
from torch._inductor import config, cpu_vec_isa, decomposition, graph, lowering, standalone_compile
from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir
from torch._inductor.standalone_compile import CompiledArtifact
