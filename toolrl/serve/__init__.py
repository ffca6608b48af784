"""Use of a trained model: server, export, generation, chat."""
