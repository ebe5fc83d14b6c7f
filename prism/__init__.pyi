from .errors import PrismError as PrismError
from .estimate import estimate as estimate
from .estimate import summarize_estimate as summarize_estimate
from .fit import fit as fit
from .fit import fit_calibrated as fit_calibrated
from .fit import summarize_fit as summarize_fit
from .job import Job as Job
from .job import load_job as load_job
from .library import load_library as load_library
from .place import place as place
from .place import summarize_place as summarize_place
from .placement import NodeSlowdown as NodeSlowdown
from .placement import slow_node as slow_node
from .rank import rank as rank
from .rank import summarize_rank as summarize_rank
from .replay import replay as replay
from .replay import summarize_replay as summarize_replay
from .results import load as load
from .results import save as save
from .results import summary as summary
from .schedule import make_schedule as make_schedule
from .simulate import simulate as simulate
from .sweep import summarize_sweep as summarize_sweep
from .sweep import sweep as sweep
from .validate import summarize_validation as summarize_validation
from .validate import validate as validate

__version__: str
