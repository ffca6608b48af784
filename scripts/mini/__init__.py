"""The generator of the embedded dataset: vocabulary (domains, phrases, values) and sampling of rows."""
