"""Pure data that passes between the rooms: saved graph, tasks, plan, recipes, queries. No tensors."""

from gistkit.ir.contract import Contract, Measured, PlannedCall, Prediction
from gistkit.ir.forms import FORMS, KERNEL_DTYPES, NEVER, OPERATORS, RERUN, STAY, Form, zeros_left_out
from gistkit.ir.graph_record import GraphRecord, Kept
from gistkit.ir.plan import PLACES, REMEDY, Budget, CallChoice, Decision, Plan
from gistkit.ir.queries import ACTV, CONCAT, CONV, KINDS, Layer, Reading, Uses, layers, numel, written_late
from gistkit.ir.returns import (
    WORD_BYTES,
    arithmetic_bytes,
    chain,
    digest_bytes,
    held,
    is_recipe,
    norms,
    part_bytes,
    rerun_of,
)
from gistkit.ir.saved_graph import (
    LIBRARY,
    Call,
    ModuleCall,
    Passing,
    Save,
    SavedGraph,
    SavedStorage,
    StateTensor,
    Value,
)
from gistkit.ir.scale import goes_as, scaled
from gistkit.ir.serial import from_json, to_json
from gistkit.ir.tasks import BACKWARD, BEFORE, FORWARD, Block, ConvShape, Task, Use, by_key, summed
