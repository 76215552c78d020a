"""What a reader's code and the checks themselves are worth: verdicts, progress, mutations."""
