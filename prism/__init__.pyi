from .errors import PrismError as PrismError
from .estimate import estimate as estimate
from .job import Job as Job
from .job import load_job as load_job
from .library import load_library as load_library
from .results import load as load
from .results import save as save
from .results import summary as summary
from .schedule import make_schedule as make_schedule
from .simulate import simulate as simulate

__version__: str
