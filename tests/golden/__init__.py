"""Orders, states and files as an earlier revision had them, recorded in golden.json."""
