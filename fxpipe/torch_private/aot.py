"""What traces a step into a joint graph."""

from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
