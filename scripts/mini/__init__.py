"""What the embedded data set is made of: vocabulary (domains, phrases, values) and the code that draws rows from it."""
