"""Names of torch functions, by how they are answered during a replay."""

# The fake tensor itself, or torch for it, answers these: they need no values.
NATIVE = frozenset(
    (
        "size",
        "stride",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "get_device",
        "__len__",
        "__hash__",
        "storage_offset",
        "is_same_size",
        "is_pinned",
        "is_inference",
        "is_conj",
        "is_neg",
        "is_set_to",
        "dim_order",
        "is_distributed",
        "_is_view",
        "is_nonzero_static",
        "has_names",
        "__dir__",
        "is_coalesced",
        "is_tensor",
        "is_storage",
        "_is_zerotensor",
        "_has_compatible_shallow_copy_type",
    )
)
GETTERS = frozenset(
    (
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_mps",
        "is_xpu",
        "itemsize",
        "nbytes",
        "names",
        "grad",
        "_version",
        "output_nr",
        "is_mkldnn",
        "is_sparse_csr",
        "is_nested",
        "is_vulkan",
        "is_xla",
        "is_hpu",
        "is_ipu",
        "is_maia",
        "is_mtia",
        "name",
        "retains_grad",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "is_inference",
    )
)
WITHOUT_GRADIENT = frozenset(
    ("detach", "detach_", "data", "argmax", "argmin", "argsort", "eq", "ne", "lt", "gt", "le", "ge")
)
READS_VALUES = frozenset(
    (
        "data_ptr",
        "storage",
        "untyped_storage",
        "_typed_storage",
        "__array_interface__",
        "__cuda_array_interface__",
        "__dlpack__",
        "share_memory_",
        "__reduce_ex__",
        "__deepcopy__",
    )
)
IN_PLACE = frozenset(
    (
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
        "__idiv__",
        "__ifloordiv__",
        "__imod__",
        "__ipow__",
        "__iand__",
        "__ior__",
        "__ixor__",
        "__ilshift__",
        "__irshift__",
    )
)
# functions that may get a packed sequence
PACKED = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu", "_pack_padded_sequence", "_pad_packed_sequence"))
RESHAPING_IN_PLACE = frozenset(
    (
        "squeeze_",
        "unsqueeze_",
        "transpose_",
        "t_",
        "resize_",
        "resize_as_",
        "as_strided_",
        "swapaxes_",
        "swapdims_",
    )
)
