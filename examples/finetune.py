"""Fine-tunes a Flax model of Hugging Face's transformers from a local folder that has its config.json and weights.

    python -m pip install "transformers<5"
    python examples/finetune.py --model gpt2 --folder run

transformers 5 has no Flax models, so this needs version 4. `--model` is a folder that `save_pretrained` of any causal
language model or `huggingface-cli download` wrote. After the run, `run/model` is such a folder, too.
"""

from __future__ import annotations

import functools
from typing import Any

import common
import jax
import optax
from flax.training.train_state import TrainState

import minialpa

LENGTH, BATCH_SIZE = 32, 16


def main(argv: list[str] | None = None) -> None:
    parser = common.flag_parser(__doc__)
    parser.add_argument("--model", required=True, help="the folder with config.json and weights")
    flags = common.start(parser, argv)
    if flags.folder is None:
        parser.error("fine-tuning begins with a checkpoint of the weights: add --folder FOLDER")
    try:
        from transformers import FlaxAutoModelForCausalLM
    except ImportError as error:
        raise SystemExit('This needs Flax models: python -m pip install "transformers<5"') from error

    # `_do_init=False` keeps the weights apart from the model, on the host.
    model, pretrained = FlaxAutoModelForCausalLM.from_pretrained(flags.model, _do_init=False)
    optimizer = optax.adamw(1e-4)

    def state_of(params: Any) -> TrainState:
        return TrainState.create(apply_fn=model.__call__, params=params, tx=optimizer)

    def create_state() -> TrainState:
        return state_of(model.init_weights(jax.random.key(0), (1, LENGTH)))

    def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, Any]:
        def loss_of(params: Any) -> jax.Array:
            logits = state.apply_fn(batch["tokens"], params=params).logits
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        loss, grads = minialpa.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    # `train` continues from the checkpoint of step 0, and each device reads only its part of it.
    if not flags.checkpoints.exists():
        with jax.default_device(jax.devices("cpu")[0]):
            minialpa.save_checkpoint(flags.checkpoints, state_of(pretrained), step=0)

    step = minialpa.parallelize(train_step, method=common.method_of(flags))
    result = common.train(
        flags, step, create_state, functools.partial(common.texts, model.config.vocab_size, LENGTH, BATCH_SIZE)
    )
    model.save_pretrained(flags.folder / "model", params=jax.device_get(result.state.params))


if __name__ == "__main__":
    main()
