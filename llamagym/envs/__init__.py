"""Text environments, registered with Gymnasium; some need an extra of this package."""

import gymnasium

# Gymnasium imports the module when the environment is made.
_ENTRY_POINTS = {
    "llamagym/AddressBook-v0": "llamagym.envs.address_book:AddressBook",
    "llamagym/BabyAI-v0": "llamagym.envs.babyai:make_babyai",
    "llamagym/GuessTheNumber-v0": "llamagym.envs.guess_number:GuessTheNumber",
    "llamagym/Mastermind-v0": "llamagym.envs.mastermind:Mastermind",
    "llamagym/TextWorld-v0": "llamagym.envs.textworld:TextWorldEnv",
}


def register() -> None:
    """Registers the environments for `gymnasium.make`."""
    for name, entry_point in _ENTRY_POINTS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point)
