"""No history makes the pool compute on a wrong byte, leak, or forget what it saved."""

from tests.engine_machine import EngineMachine

TestEngineMachine = EngineMachine.TestCase
