"""Names of Transformer Engine variants, such as `te current bf16-params + CUDA graph`. Imports no Transformer Engine.

`te RECIPE` has a recipe of `RECIPES`: `bf16` computes without FP8. Words of `WORDS` may follow in any order:

- `bf16-params`: bfloat16 parameters, and FusedAdam of Transformer Engine with float32 master weights. Without this word,
  parameters are float32 and the optimizer is the fused AdamW of PyTorch.
- `fp8-params`: FP8 parameters of the blocks (`quantized_model_init`), and FusedAdam with float32 master weights.
- `fp8-attention`: attention in FP8, with the recipes `delayed` and `current`.
- `cutlass`: grouped matmuls in bfloat16 with CUTLASS instead of cuBLAS on several streams.
- `graphed-attention`: attention of each block in CUDA graphs (`make_graphed_callables`), for mixtures of experts.
- `+ CUDA graph`: the whole step in one CUDA graph.

With `fully_shard`, dense models take the kinds of parameters and `fp8-attention`. Parameters are gathered in bfloat16, and with
`fp8-params` in FP8.
"""

from dataclasses import dataclass

RECIPES = ("bf16", "delayed", "current", "blockwise")
PARAMS = {"bf16-params": "bfloat16", "fp8-params": "fp8"}
WORDS = (*PARAMS, "fp8-attention", "cutlass", "graphed-attention")
GRAPH = "+ CUDA graph"


@dataclass(frozen=True, kw_only=True)
class TEVariant:
    """A variant of Transformer Engine.

    Attributes:
        recipe: An entry of `RECIPES`.
        params: Storage of the parameters of the blocks: float32, bfloat16 or fp8.
        attention: Precision of attention: bf16 or fp8.
        grouped: Library of grouped matmuls in bfloat16: cublas or cutlass.
        graph: Extent of the CUDA graphs: none, attention or step.
    """

    recipe: str
    params: str = "float32"
    attention: str = "bf16"
    grouped: str = "cublas"
    graph: str = "none"


def is_te(name: str) -> bool:
    """Returns True if a variant name selects Transformer Engine."""
    return "te" in name.split()


def parse_variant(name: str) -> TEVariant:
    """Parses the name of a variant, optionally after the system `torch`. Exits if words are unknown or exclude each other."""
    text, plus, rest = name.removeprefix("torch ").partition(GRAPH)
    te, recipe, *words = (*text.split(), "", "")[: max(2, len(text.split()))]
    params = [word for word in words if word in PARAMS]
    if te != "te" or recipe not in RECIPES or set(words) - set(WORDS) or rest.strip() or len(params) > 1:
        allowed = f"te {'|'.join(RECIPES)}, then any of {', '.join(WORDS)}, then {GRAPH}"
        raise SystemExit(f"unknown variant {name!r} of Transformer Engine: use {allowed}; one kind of parameters")
    for word, recipes in {"fp8-params": RECIPES[1:], "fp8-attention": ("delayed", "current"), "cutlass": ("bf16",)}.items():
        if word in words and recipe not in recipes:
            raise SystemExit(f"variant {name!r} of Transformer Engine: {word} needs the recipe {' or '.join(recipes)}")
    return TEVariant(
        recipe=recipe,
        params=PARAMS[params[0]] if params else "float32",
        attention="fp8" if "fp8-attention" in words else "bf16",
        grouped="cutlass" if "cutlass" in words else "cublas",
        graph="step" if plus else "attention" if "graphed-attention" in words else "none",
    )


def parse_sharded_variant(name: str) -> TEVariant:
    """Parses the name of a variant for `fully_shard`. Exits if `fully_shard` does not support it."""
    variant = parse_variant(name)
    if (variant.graph, variant.grouped) != ("none", "cublas"):
        raise SystemExit(f"variant {name!r} of Transformer Engine: fully_shard has no CUDA graph and no grouped matmul")
    if (variant.recipe, variant.params) == ("blockwise", "fp8"):  # its all-gather drops the padding of the scales
        raise SystemExit(f"variant {name!r} of Transformer Engine: fully_shard gathers FP8 only with delayed or current")
    return variant
