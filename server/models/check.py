# SPDX-License-Identifier: Apache-2.0
"""A package against its reference: perplexity on three texts, agreement of the most likely token.

The reference is the checkpoint itself in plain numpy float32; a package without its checkpoint is measured
alone and compared with the figures that its build left in the manifest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer

from server.models.package import ModelPackage, PackageError
from server.models.readers.checkpoint import Checkpoint, FloatArray
from server.models.reference import ReferenceModel, negative_log_likelihoods
from server.models.texts import EVALUATION

CHUNK = 64  # tokens whose whole odds are held at once: 64 × 49 152 × 4 bytes = 12 MiB
# perplexity over the reference's, all texts together; what a build must keep
LIMITS = {"fp32": 1.0005, "w8": 1.005, "w8a8": 1.02, "w4": 1.03}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReport:
    """One text: perplexities and the share of positions whose most likely token is the reference's."""

    name: str
    num_tokens: int
    perplexity: float
    reference_perplexity: float | None
    agreement: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """All texts, and the ratio of perplexities over all their tokens."""

    quantization: str
    texts: tuple[TextReport, ...]
    ratio: float | None
    limit: float

    @property
    def is_good(self) -> bool:
        """Whether the package keeps its limit; true when there is nothing to compare with."""
        return self.ratio is None or self.ratio <= self.limit

    def as_fidelity(self) -> dict[str, float]:
        """The figures by name, for a manifest."""
        figures: dict[str, float] = {}
        for text in self.texts:
            figures[f"perplexity_{text.name}"] = round(text.perplexity, 4)
            if text.reference_perplexity is not None and text.agreement is not None:
                figures[f"reference_perplexity_{text.name}"] = round(text.reference_perplexity, 4)
                figures[f"agreement_{text.name}"] = round(text.agreement, 4)
        if self.ratio is not None:
            figures["perplexity_ratio"] = round(self.ratio, 5)
        return figures


def measure_package(package: ModelPackage, reference: Checkpoint | None) -> CheckReport:
    """Run every evaluation text through the package and, when there is one, its reference."""
    tokenizer = Tokenizer.from_file(str(package.tokenizer_path))
    graph = _Graph(package)
    oracle = None if reference is None else ReferenceModel(reference)
    reports, surprise, expected = [], [], []
    for name, content in EVALUATION.items():
        ids = tokenizer.encode(content, add_special_tokens=False).ids[: package.manifest.shape.context_length]
        odds = graph.logprobs(ids)
        own = negative_log_likelihoods(odds, ids)
        surprise.append(own)
        other = agreement = None
        if oracle is not None:
            oracle.reset()
            logits = oracle.forward(ids)
            other = negative_log_likelihoods(logits, ids)
            expected.append(other)
            agreement = float((odds.argmax(axis=-1) == logits.argmax(axis=-1)).mean())
        reports.append(
            TextReport(
                name=name,
                num_tokens=len(ids),
                perplexity=_perplexity([own]),
                reference_perplexity=None if other is None else _perplexity([other]),
                agreement=agreement,
            )
        )
    return CheckReport(
        quantization=package.manifest.quantization,
        texts=tuple(reports),
        ratio=_perplexity(surprise) / _perplexity(expected) if expected else _stored(package, surprise),
        limit=LIMITS[package.manifest.quantization],
    )


def check_package(package: ModelPackage, reference: Checkpoint | None) -> CheckReport:
    """Measure, and refuse a package beyond its limit.

    Raises:
        PackageError: the graph does not load, gives values that are not finite, or misses its limit.
    """
    report = measure_package(package, reference)
    if not report.is_good:
        raise PackageError(
            f"the {report.quantization} package of {package.manifest.model_id} has {report.ratio:.4f} times "
            f"the perplexity of its source, the limit is {report.limit}; choose another quantisation"
        )
    return report


class _Graph:
    """The package's graph for one sequence, with its own keys and values."""

    def __init__(self, package: ModelPackage) -> None:
        self.shape = package.manifest.shape
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.x64quantprecision", "1")
        try:
            self.session = ort.InferenceSession(
                str(package.graph_path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # the runtime raises many kinds, all meaning the same here
            raise PackageError(f"{package.graph_path} does not load: {error}") from error

    def logprobs(self, ids: Sequence[int]) -> FloatArray:
        """Log-probabilities after every token, [tokens, vocab], in chunks as the engine prefills."""
        shape = self.shape
        size = (1, shape.num_kv_heads, len(ids), shape.head_dim)
        names = [f"{layer}.{kind}" for layer in range(shape.num_layers) for kind in ("key", "value")]
        memory = {name: np.zeros(size, np.float32) for name in names}
        starts = range(0, len(ids), CHUNK)
        odds: FloatArray = np.concatenate(
            [self._chunk(ids[start : start + CHUNK], start, memory) for start in starts]
        )
        if np.isnan(odds).any():
            raise PackageError("the graph gives values that are not numbers")
        return odds

    def _chunk(self, ids: Sequence[int], start: int, memory: dict[str, FloatArray]) -> FloatArray:
        binding, total = self.session.io_binding(), start + len(ids)
        feeds = {
            "input_ids": np.array([ids], np.int64),
            "query_seqlens": np.array([len(ids)], np.int32),
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
            "positions": np.arange(len(ids), dtype=np.int64)[None],
        }
        for name, values in feeds.items():
            binding.bind_cpu_input(name, values)
        for name, values in memory.items():
            place = ("cpu", 0, np.float32, values.shape, values.ctypes.data)
            binding.bind_input(f"past.{name}", *place)
            binding.bind_output(f"present.{name}", *place)
        binding.bind_output("logprobs")
        self.session.run_with_iobinding(binding)
        outputs = dict(zip(self._bound(memory), binding.get_outputs(), strict=True))
        odds: FloatArray = outputs["logprobs"].numpy()[0]
        return odds

    @staticmethod
    def _bound(memory: dict[str, FloatArray]) -> list[str]:
        return [*(f"present.{name}" for name in memory), "logprobs"]


def _perplexity(surprises: Sequence[FloatArray]) -> float:
    return float(np.exp(np.concatenate(list(surprises)).mean()))


def _stored(package: ModelPackage, surprise: Sequence[FloatArray]) -> float | None:
    """The ratio to the reference that the build measured, when its texts are the ones of today."""
    fidelity = package.manifest.fidelity
    logs = [fidelity.get(f"reference_perplexity_{name}") for name in EVALUATION]
    if any(value is None for value in logs):
        return None
    weights = [len(part) for part in surprise]
    mean = np.average(np.log(np.array(logs, np.float64)), weights=weights)
    return _perplexity(surprise) / float(np.exp(mean))
