"""Texts of failures that need a GPU, several machines or a broken installation. torch and CUDA printed them;
they come from public reports and are not run here.

Only the messages are kept, without the reporters' own paths and programs.
"""

from __future__ import annotations

from dataclasses import dataclass

LATER = """CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
FRAMES = """Traceback (most recent call last):
  File "/home/me/train.py", line 31, in <module>
    main()
  File "/home/me/train.py", line 24, in main
    loss = criterion(model(images), labels)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
"""
PYTORCH = "https://github.com/pytorch/pytorch/issues/"


@dataclass(frozen=True)
class Recorded:
    code: str
    says: tuple[str, ...]  # what the cause must contain
    source: str
    text: str
    needs: str = "a GPU"


RECORDED = (
    Recorded(
        "FE001",
        ("cuda:0", "cpu"),
        "https://github.com/Lightricks/LTX-Video/issues/24",
        FRAMES + "RuntimeError: Expected all tensors to be on the same device, but found at "
        "least two devices, cuda:0 and cpu! (when checking argument for argument mat2 in method wrapper_CUDA_mm)\n",
    ),
    Recorded(
        "FE001",
        ("cuda:0", "cpu"),
        "https://github.com/ClownsharkBatwing/RES4LYF/pull/223",
        "Expected all tensors to be on the same device, but got mat1 is on cpu, different "
        "from other tensors on cuda:0 (when checking argument in method wrapper_CUDA_addmm)",
    ),
    Recorded(
        "FE003",
        ("without CUDA",),
        "https://docs.pytorch.org/docs/stable/cuda.html",
        FRAMES + "AssertionError: Torch not compiled with CUDA enabled\n",
        "a build without CUDA",
    ),
    Recorded(
        "FE004",
        ("11.4", "too old"),
        "https://github.com/lllyasviel/Fooocus/issues/1313",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). "
        "Please update your GPU driver by downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx "
        "Alternatively, go to: "
        "https://pytorch.org to install a PyTorch version that has been compiled with your version of the CUDA driver.",
    ),
    Recorded(
        "FE004",
        ("9.0", "too old"),
        "https://github.com/wuhuikai/FastFCN/issues/37",
        "AssertionError: \nThe NVIDIA driver on your system is too old (found version 9000).\nPlease "
        "update your GPU driver by downloading and installing a new\nversion from the URL: http://www.nvidia.com/Download/index.aspx\n",
    ),
    Recorded(
        "FE005",
        ("not built",),
        "https://github.com/Comfy-Org/ComfyUI/issues/10468",
        FRAMES + "torch.AcceleratorError: CUDA error: no kernel image is available for execution on "
        "the device\nSearch for `cudaErrorNoKernelImageForDevice' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
        "group__CUDART__TYPES.html for more information.\n" + LATER,
    ),
    Recorded(
        "FE006",
        ("number",),
        "https://github.com/OpenBMB/MiniCPM-V/issues/356",
        "".join(
            f"[rank6]: {line}\n"
            for line in (FRAMES + "RuntimeError: CUDA error: invalid device ordinal\n" + LATER).splitlines()
        ),
    ),
    Recorded(
        "FE035",
        ("label",),
        "https://github.com/milesial/Pytorch-UNet/issues/375",
        "../aten/src/ATen/native/cuda/NLLLoss2d.cu:103: nll_loss2d_forward_kernel: block: [5,0,0], thread: [996,0,0] Assertion `t >= 0 && "
        "t < n_classes` failed.\n" + FRAMES + "RuntimeError: CUDA error: device-side assert triggered\n",
    ),
    Recorded(
        "FE040",
        ("22.8 GiB", "31.5 GiB", "12.7 GiB"),
        "https://github.com/murong-xu/CADS/issues/4",
        FRAMES + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 "
        "GiB. GPU 0 has a total capacity of 31.47 GiB of which 12.73 GiB is free. Including non-PyTorch memory, this process has 18.73 GiB "
        "memory in use. Of the allocated memory "
        "9.08 GiB is allocated by PyTorch, and 9.35 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)\n",
    ),
    Recorded(
        "FE040",
        ("1.70 GiB", "6.00 GiB"),
        "https://github.com/carolchenyx/MGFN./issues/35",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has "
        "a total capacty of 6.00 GiB of which 0 bytes is free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB is "
        "reserved by PyTorch but unallocated. If "
        "reserved but unallocated memory is large try setting max_split_size_mb to avoid fragmentation.",
    ),
    Recorded(
        "FE040",
        ("12.5 MiB", "9.28 GiB"),
        PYTORCH + "16417",
        "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; 8.57 MiB already "
        "allocated; 9.28 GiB free; 4.68 MiB cached)",
    ),
    Recorded(
        "FE040",
        ("memory is full",),
        "https://github.com/QwenLM/Qwen3/issues/873",
        FRAMES + "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`\n",
    ),
    Recorded(
        "FE050",
        ("CUDNN_STATUS_NOT_INITIALIZED",),
        "https://github.com/Comfy-Org/ComfyUI/issues/11723",
        FRAMES + "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED\n",
    ),
    Recorded(
        "FE051",
        ("CUBLAS_STATUS_EXECUTION_FAILED", "cublasSgemm"),
        "https://github.com/jadore801120/attention-is-all-you-need-pytorch/issues/193",
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k, &alpha, a, lda, b, "
        "ldb, &beta, c, ldc)`",
    ),
    Recorded(
        "FE052",
        ("outside",),
        "https://github.com/yewzijian/RegTR/issues/33",
        FRAMES + "RuntimeError: CUDA error: an illegal memory access was encountered\n" + LATER,
    ),
    Recorded(
        "FE052",
        ("outside",),
        "https://github.com/skhu101/GauHuman/issues/21",
        "RuntimeError: merge_sort: failed to synchronize: cudaErrorIllegalAddress: an illegal memory access was encountered",
    ),
    Recorded(
        "FE053",
        ("uncorrectable ECC",),
        "https://github.com/zai-org/ChatGLM3/issues/681",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered\n" + LATER,
    ),
    Recorded(
        "FE053",
        ("unspecified launch failure",),
        "https://github.com/CSUBioGroup/PGMG/issues/3",
        "RuntimeError: CUDA error: unspecified launch failure",
    ),
    Recorded(
        "FE086",
        ("ALLREDUCE", "1580", "0, 4"),
        "https://github.com/hiyouga/LlamaFactory/issues/7396",
        "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, "
        "NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600060 milliseconds before timing out.\n"
        "[rank4]:[E321 02:07:08.414640780 ProcessGroupNCCL.cpp:607] [Rank 4] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, "
        "NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600067 milliseconds before timing out.\n"
        "[rank0]:[E321 02:07:08.465150152 ProcessGroupNCCL.cpp:1664] [PG 1 Rank 0] Exception (either an error or timeout) detected by "
        "watchdog at work: 1580, last enqueued NCCL "
        "work: 1582, last completed NCCL work: 1579.\n",
        "several GPUs",
    ),
    Recorded(
        "FE086",
        ("rank 3", "BROADCAST"),
        "https://github.com/NVIDIA/nccl/issues/1409",
        "[rank7]:[E816 01:45:40.183009389 ProcessGroupNCCL.cpp:607] [Rank 7] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=80078, OpType=BROADCAST, NumelIn=5056, "
        "NumelOut=5056, Timeout(ms)=600000) ran for 600026 milliseconds before timing out.\n"
        "[rank3]:[E816 01:45:40.272150935 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=80077, OpType=ALLREDUCE, "
        "NumelIn=2106881, NumelOut=2106881, Timeout(ms)=600000) ran for 600013 milliseconds before timing out.\n",
        "several GPUs",
    ),
    Recorded(
        "FE087",
        ("unhandled cuda error", "invalid argument"),
        "https://github.com/NVIDIA/nccl/issues/1410",
        "".join(
            f"[rank7]: {line}\n"
            for line in (
                FRAMES
                + "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, "
                "unhandled cuda error (run with NCCL_DEBUG=INFO for details), "
                "NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 1 'invalid argument'\n"
            ).splitlines()
        ),
        "several GPUs",
    ),
    Recorded(
        "FE089",
        ("rank 0", "SIGKILL", "14750"),
        "https://github.com/lzhxmu/CPPO/issues/6",
        'Traceback (most recent call last):\n  File "/usr/lib/python3/dist-packages/torch/'
        'distributed/launcher/api.py", line 269, in launch_agent\n    raise ChildFailedError(\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "============================================================\nsrc/open_r1/grpo_gsm.py "
        "FAILED\n------------------------------------------------------------\nFailures:\n"
        "  <NO_OTHER_FAILURES>\n------------------------------------------------------------\nRoot Cause (first observed failure):\n[0]:\n "
        " time      : 2025-05-21_15:43:03\n"
        "  host      : worker\n  rank      : 0 (local_rank: 0)\n  exitcode  : -9 (pid: 14750)\n  error_file: <N/A>\n  traceback : Signal 9 "
        "(SIGKILL) received by PID 14750\n"
        "============================================================\n",
        "torchrun, and 6 s",
    ),
    Recorded(
        "FE043",
        ("3453", "/dev/shm"),
        PYTORCH + "5040",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n"
        + FRAMES
        + "RuntimeError: DataLoader worker (pid 3453) is killed by signal: Bus error. \n",
        "a small /dev/shm",
    ),
    Recorded(
        "FE042",
        ("OOM killer", "python", "4242"),
        "https://docs.kernel.org/admin-guide/mm/concepts.html",
        "[88392.1] Out of memory: Killed process 4242 (python) total-vm:93842kB, anon-rss:67108864kB, file-rss:0kB, shmem-rss:0kB\nKilled\n",
        "a machine out of memory",
    ),
    Recorded(
        "FE042",
        ("OOM killer",),
        "https://docs.docker.com/engine/containers/resource_constraints/",
        "epoch 3 loss 0.21\nbash: line 1:  4242 Killed                  python train.py\n",
        "a machine out of memory",
    ),
    Recorded(
        "FE106",
        ("no torch", "source .venv/bin/activate"),
        "https://docs.python.org/3/library/venv.html",
        "Traceback (most recent call last):\n  File \"train.py\", line 1, in <module>\n    import torch\nModuleNotFoundError: No module named 'torch'\n",
        "a Python without torch",
    ),
    *(
        Recorded(
            code,
            says,
            "https://docs.pytorch.org/docs/stable/notes/faq.html",
            'Traceback (most recent call last):\n  File "/usr/lib/python3/dist-packages/torch/__init__.py", line 427, in <module>\n'
            f"    from torch._C import *\n{text}\n",
            "a broken installation",
        )
        for code, says, text in (
            (
                "FE107",
                ("libcurand.so.10", "glibc 2.27", "docker run"),
                "ImportError: /lib64/libm.so.6: version `GLIBC_2.27' not found (required by /x/torch/lib/../../libcurand.so.10)",
            ),
            (
                "FE107",
                ("GLIBCXX_3.4.30", "but not that of libcuda.so"),
                "ImportError: /usr/lib/libstdc++.so.6: version `GLIBCXX_3.4.30' not found (required by /x/libtorch.so)",
            ),
            (
                "FE107",
                ("libcudart.so.13 is not a complete library",),
                "OSError: /opt/cuda/lib64/libcudart.so.13: file too short",
            ),
            (
                "FE107",
                ("another Python", "unset PYTHONPATH"),
                "ModuleNotFoundError: No module named 'torch._C'",
            ),
            (
                "FE104",
                ("libtorch_cuda.so", "ncclCommRegister"),
                "ImportError: /x/torch/lib/libtorch_cuda.so: undefined symbol: ncclCommRegister",
            ),
            (
                "FE104",
                ("libcufft.so.12 was not found", "force-reinstall torch"),
                "ImportError: libcufft.so.12: cannot open shared object file: No such file or directory",
            ),
        )
    ),
)
