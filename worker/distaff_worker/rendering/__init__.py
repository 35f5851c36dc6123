"""Messages to exact token ids and back, in the chat format of the model that is trained."""
