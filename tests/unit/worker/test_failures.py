import pytest
import torch

from gpu_node.shell.worker.loop import failure_of


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x64 and 32x10)"),
        RuntimeError("the schedule's timestamps go back"),
        ValueError("no such label"),
    ],
)
def test_an_error_of_the_work_leaves_the_worker_be(error: Exception) -> None:
    failed = failure_of(error)
    assert not failed.is_fatal
    assert failed.reason == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_running_out_of_memory_is_fatal_and_says_the_fix(error: Exception) -> None:
    failed = failure_of(error)
    assert failed.is_fatal
    assert "lower training.batch_size" in failed.reason


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate(handle)",
    ],
)
def test_a_fault_of_the_driver_is_fatal(text: str) -> None:
    assert failure_of(RuntimeError(text)).is_fatal


def test_an_error_without_a_text_is_told_by_its_kind() -> None:
    assert failure_of(RuntimeError()).reason == "RuntimeError"
