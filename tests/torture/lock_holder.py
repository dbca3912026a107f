"""A process that takes the GPU lock again and again: `lock_holder.py LOG TIMES SECONDS [DEED]`.

The class `Gpu` is the product's; the CUDA runtime under it is a few made answers. Each line of the
log is `enter PID` or `leave PID`. `DEED` is what is done while the lock is held the first time:
`hang`, or `fork` (a helper that lives on with everything that was open), then hang. With the deed
`nobody` the process gives up being root first.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

#: The made device's identity; tests lock no real GPU with it.
UUID = bytes(range(16))


def made_runtime() -> ModuleType:
    """As much of `cuda.bindings.runtime` as `Gpu` asks when it is made."""
    runtime = ModuleType("cuda.bindings.runtime")
    properties = SimpleNamespace(
        name=b"Made GPU", uuid=SimpleNamespace(bytes=UUID), major=9, minor=0, l2CacheSize=1 << 20
    )
    answers = {
        "cudaGetDeviceCount": (0, 1),
        "cudaSetDevice": (0,),
        "cudaSetDeviceFlags": (0,),
        "cudaGetDeviceProperties": (0, properties),
        "cudaDriverGetVersion": (0, 13000),
    }
    for name, answer in answers.items():
        setattr(runtime, name, lambda *_, answer=answer: answer)
    runtime.cudaDeviceScheduleSpin = 1  # type: ignore[attr-defined]
    return runtime


def made_gpu() -> object:
    """The product's `Gpu` over the made runtime."""
    bindings = ModuleType("cuda.bindings")
    bindings.runtime = made_runtime()  # type: ignore[attr-defined]
    sys.modules.setdefault("cuda", ModuleType("cuda"))
    sys.modules["cuda.bindings"] = bindings
    from routepilot.env.gpu_timing import Gpu

    return Gpu()


def main(log: Path, times: int, seconds: float, deed: str = "") -> None:
    gpu = made_gpu()

    def say(word: str) -> None:
        with log.open("a") as file:
            file.write(f"{word} {os.getpid()}\n")

    if deed == "nobody":
        os.setuid(65534)
    for _ in range(times):
        with gpu.lock(), gpu.lock():  # type: ignore[attr-defined]
            say("enter")
            if deed == "fork" and os.fork() == 0:
                time.sleep(1000)
            if deed in ("hang", "fork"):
                time.sleep(1000)
            time.sleep(seconds)
            say("leave")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:])
