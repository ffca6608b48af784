"""Formats: how a recipe's dialogue looks as text. One file per tool format, pure text in and out."""
