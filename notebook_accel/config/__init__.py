"""One schema for every option of a launch: the file, the flags, the questionnaire, the form and the environment.

Importing this package imports none of it: workers get what a config says as environment variables and arguments.
"""
