"""The megakernel: typed XLA FFI handlers in one shared library, and the buffers of weights that they read.

`load` builds and registers the handlers, `unavailable` says why they cannot serve. `ffi.layout` defines the buffers.
The word is common, so write `import ffi as muse_ffi`.
"""

from ffi.layout import Shape, pack_head, pack_layer, unpack_head, unpack_layer
from ffi.library import load, unavailable

__all__ = ["Shape", "load", "pack_head", "pack_layer", "unavailable", "unpack_head", "unpack_layer"]
