"""Programs: found in a completion, run on their problem's tests in a sandbox, compared outside it."""
