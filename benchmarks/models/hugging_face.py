"""The Flax models of transformers (below 5) and diffusers, made from small configurations, without downloads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.models.catalogue import DATA_2, PIPE_2, PIPE_4, SHARD, ZERO_2, ZERO_3, Training, model
from benchmarks.models.common import (
    N_EXAMPLES,
    batches,
    cross_entropy,
    floats,
    integers,
    minimise_noisy,
    next_token_loss,
)

#: Sizes by the names that most configurations give them: of the layers, and of a model of words.
LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SIZES = {"vocab_size": 48, **LAYERS}
#: The same by the names of models with an encoder and a decoder.
ENCODER_DECODER = {
    "vocab_size": 48, "d_model": 16,
    "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32,
}  # fmt: skip


def _train(net: Any, loss: Any, data: list[Any], optimizer: Any = None) -> Training:
    """loss: a function of `(apply, batch)`; `apply` takes the arguments of the network."""

    def loss_of(params: Any, batch: Any, key: Any) -> jax.Array:
        def apply(*args: Any, **named: Any) -> Any:
            return net(*args, params=params, dropout_rng=key, train=True, **named)

        return jnp.asarray(loss(apply, batch))

    return minimise_noisy(loss_of, net.params, optimizer or optax.adamw(1e-3), data)


def _texts(length: int = 10) -> list[Any]:
    def batch(s: int) -> Any:
        n = integers(4, N_EXAMPLES, 1, seed=s + 1) + length - 4
        return {
            "input_ids": integers(44, N_EXAMPLES, length, seed=s) + 4,
            "attention_mask": (jnp.arange(length) < n).astype("int32"),
            "labels": integers(3, N_EXAMPLES, seed=s + 2),
        }

    return batches(batch)


def _classified(apply: Any, batch: Any) -> Any:
    return cross_entropy(apply(batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch["labels"])


def _continued(apply: Any, batch: Any) -> Any:
    return next_token_loss(apply(batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch["input_ids"])


def _translated(apply: Any, batch: Any) -> Any:
    logits = apply(
        batch["input_ids"], attention_mask=batch["attention_mask"], decoder_input_ids=batch["input_ids"][:, ::-1]
    ).logits
    return cross_entropy(logits, batch["input_ids"])


def _text_model(
    name: str, title: str, *, config: str, flax_class: str, loss: Any, methods: tuple[str, ...], **sizes: Any
) -> None:
    """Register a model of texts. sizes: the arguments of its configuration."""

    def build() -> Training:
        import transformers

        sized = getattr(transformers, config)(**sizes)
        return _train(getattr(transformers, flax_class)(sized, input_shape=(1, 10)), loss, _texts())

    build.__name__ = name
    model("transformers flax", title, "adamw", methods)(build)


_text_model(
    "bert",
    "BERT, classification",
    config="BertConfig",
    flax_class="FlaxBertForSequenceClassification",
    loss=_classified,
    methods=(SHARD, ZERO_2, PIPE_2),
    num_labels=3,
    **SIZES,
)
_text_model(
    "albert",
    "ALBERT (shared layers), classification",
    config="AlbertConfig",
    flax_class="FlaxAlbertForSequenceClassification",
    loss=_classified,
    methods=(SHARD, PIPE_2),
    num_labels=3,
    embedding_size=16,
    **SIZES,
)
_text_model(
    "roformer",
    "RoFormer (rotary), masked words",
    config="RoFormerConfig",
    flax_class="FlaxRoFormerForMaskedLM",
    loss=_continued,
    methods=(SHARD, ZERO_3),
    **SIZES,
)
_text_model(
    "big_bird",
    "BigBird (sparse attention), masked words",
    config="BigBirdConfig",
    flax_class="FlaxBigBirdForMaskedLM",
    loss=_continued,
    methods=(SHARD, PIPE_2),
    attention_type="original_full",
    **SIZES,
)
_text_model(
    "gpt2",
    "GPT-2",
    config="GPT2Config",
    flax_class="FlaxGPT2LMHeadModel",
    loss=_continued,
    methods=(SHARD, ZERO_2, PIPE_4),
    vocab_size=48,
    n_embd=16,
    n_layer=4,
    n_head=2,
    n_positions=16,
)
_text_model(
    "gptj",
    "GPT-J",
    config="GPTJConfig",
    flax_class="FlaxGPTJForCausalLM",
    loss=_continued,
    methods=(ZERO_3, PIPE_2),
    vocab_size=48,
    n_embd=16,
    n_layer=2,
    n_head=2,
    n_positions=16,
    rotary_dim=4,
)
_text_model(
    "bloom",
    "BLOOM (ALiBi)",
    config="BloomConfig",
    flax_class="FlaxBloomForCausalLM",
    loss=_continued,
    methods=(SHARD, PIPE_2),
    vocab_size=48,
    hidden_size=16,
    n_layer=2,
    n_head=2,
)
_text_model(
    "llama",
    "LLaMA",
    config="LlamaConfig",
    flax_class="FlaxLlamaForCausalLM",
    loss=_continued,
    methods=(SHARD, ZERO_3, PIPE_2),
    max_position_embeddings=16,
    **SIZES,
)
_text_model(
    "t5",
    "T5",
    config="T5Config",
    flax_class="FlaxT5ForConditionalGeneration",
    loss=_translated,
    methods=(SHARD, ZERO_2, PIPE_2),
    vocab_size=48,
    d_model=16,
    d_kv=8,
    d_ff=32,
    num_layers=2,
    num_heads=2,
)
_text_model(
    "bart",
    "BART",
    config="BartConfig",
    flax_class="FlaxBartForConditionalGeneration",
    loss=_translated,
    methods=(SHARD, PIPE_2),
    max_position_embeddings=16,
    **ENCODER_DECODER,
)


def _pictures(size: int) -> list[Any]:
    return batches(lambda s: {"x": floats(N_EXAMPLES, 3, size, size, seed=s), "y": integers(3, N_EXAMPLES, seed=s + 1)})


@model("transformers flax", "ViT, classification", "adamw", (SHARD, DATA_2, PIPE_2))
def vit() -> Training:
    import transformers

    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **LAYERS)
    net = transformers.FlaxViTForImageClassification(config, input_shape=(1, 8, 8, 3))
    return _train(net, lambda apply, b: cross_entropy(apply(b["x"]).logits, b["y"]), _pictures(8))


@model("transformers flax", "CLIP", "adamw", (SHARD, PIPE_2))
def clip() -> Training:
    import transformers

    text = {**SIZES, "max_position_embeddings": 10, "eos_token_id": 2}
    vision = {**LAYERS, "image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    net = transformers.FlaxCLIPModel(config, input_shape=((1, 10), (1, 8, 8, 3)))

    def loss(apply: Any, batch: Any) -> Any:
        found = apply(batch["ids"], batch["x"])
        return cross_entropy(found.logits_per_text, jnp.arange(batch["ids"].shape[0]))

    data = batches(lambda s: {"ids": integers(48, N_EXAMPLES, 10, seed=s), "x": floats(N_EXAMPLES, 3, 8, 8, seed=s)})
    return _train(net, loss, data)


@model("transformers flax", "Whisper", "adamw", (SHARD, PIPE_2))
def whisper() -> Training:
    import transformers

    config = transformers.WhisperConfig(
        num_mel_bins=8, max_source_positions=10, max_target_positions=12, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, **ENCODER_DECODER,
    )  # fmt: skip
    net = transformers.FlaxWhisperForConditionalGeneration(config, input_shape=(1, 8, 20))

    def loss(apply: Any, batch: Any) -> Any:
        return next_token_loss(apply(batch["x"], decoder_input_ids=batch["ids"]).logits, batch["ids"])

    data = batches(lambda s: {"ids": integers(48, N_EXAMPLES, 8, seed=s), "x": floats(N_EXAMPLES, 8, 20, seed=s)})
    return _train(net, loss, data)


@model("diffusers flax", "Stable Diffusion's U-Net", "adamw", (SHARD, DATA_2, PIPE_2))
def diffusers_unet() -> Training:
    from diffusers import FlaxUNet2DConditionModel

    net = FlaxUNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=2, cross_attention_dim=16,
    )  # fmt: skip
    params = net.init_weights(jax.random.key(0))

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        noise = jax.random.normal(key, batch["x"].shape)
        found = net.apply({"params": params}, batch["x"] + noise, batch["t"], batch["text"]).sample
        return jnp.mean((found - noise) ** 2)

    def batch(s: int) -> Any:
        shapes = {"x": (4, 8, 8), "text": (5, 16)}
        found = {k: floats(N_EXAMPLES, *shape, seed=s) for k, shape in shapes.items()}
        return found | {"t": integers(1000, N_EXAMPLES, seed=s)}

    return minimise_noisy(loss, params, optax.adamw(1e-4), batches(batch))
