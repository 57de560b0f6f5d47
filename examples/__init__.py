"""Models served from a jkv pool: `python -m examples.generate` (SmolLM2) and `python -m examples.mla` (DeepSeek-V3)."""
