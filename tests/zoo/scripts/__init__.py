"""Common training scripts, one each: ``train(dispatch)`` yields the loss (or losses) of every step, without end."""
