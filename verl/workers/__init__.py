"""Code that runs on the training ranks: the model over packs, its sharding, its optimizer."""
