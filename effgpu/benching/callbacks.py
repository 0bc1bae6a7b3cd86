"""`tick` for transformers' Trainer."""

from transformers import TrainerCallback

from effgpu.attaching.ticking import tick


class TickCallback(TrainerCallback):
    """Calls `effgpu.tick` once per optimizer step of a transformers Trainer.

    The items of a step are the samples of a full batch, over all of its accumulated parts, also in the last step of an
    epoch, which may have fewer; or the tokens if the Trainer counts them (`include_num_input_tokens_seen`). The loss is
    the one that the Trainer logs, at the steps at which it does: `logging_steps=1` gives every step's.

    >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[effgpu.TickCallback()])
    """

    def __init__(self):
        self._running, self._loss, self._tokens = False, None, 0

    def on_step_begin(self, args, state, control, **kwargs):
        """End the step before: only now has the Trainer logged its loss."""
        self._end_step(args, state)
        self._running = True

    def on_train_end(self, args, state, control, **kwargs):
        """End the last step."""
        self._end_step(args, state)
        self._running = False

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Note the loss if it is logged."""
        self._loss = (logs or {}).get("loss", self._loss)  # later logs of a step have none

    def _end_step(self, args, state) -> None:
        tokens = state.num_input_tokens_seen
        items, self._tokens = tokens - self._tokens, tokens
        if self._running:
            tick(items=items or args.train_batch_size * args.gradient_accumulation_steps, loss=self._loss)
        self._loss = None
