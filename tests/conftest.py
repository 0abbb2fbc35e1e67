"""For all tests: hypothesis measures no time, as the machine may be busy with other things."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
