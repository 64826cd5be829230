"""Compiled chunks. Each rank compiles the chunks that it runs; see docs/compile.md."""

from pipepart.runtime.compiled.compiled_chunk import NotCompiled
from pipepart.runtime.compiled.compiled_stage import CompiledStage, compiled_chunks

__all__ = ["CompiledStage", "NotCompiled", "compiled_chunks"]
