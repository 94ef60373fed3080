"""How the end of a generation reaches user code.

`StepAborted` is a BaseException: no `except Exception` in user code may take it for an error of
its own and go on with a step that will be done again.
"""


class StepAborted(BaseException):
    """The step that the training thread is in will be undone and done again.

    `cause` says in words why the generation ended.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(f"this step is undone and comes again: {cause}")
        self.cause = cause


class GenerationRevoked(RuntimeError):
    """A thread other than the training thread communicated after its generation had ended."""
