"""AdminService: protobuf on the outside, the repository on the inside."""

from typing import Any, TypeAlias

import grpc

from streamsrv.errors import FieldViolation, InvalidRequestError
from streamsrv.repository import ModelState, ModelStatus, Repository
from streamsrv.service import statuses
from streamsrv.v1 import admin_pb2 as pb
from streamsrv.v1.admin_pb2_grpc import AdminServiceServicer

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

ADMIN_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["AdminService"].full_name
_LONGEST_GRACE_MS = 3_600_000

STATE_TO_PB = {
    ModelState.UNLOADED: pb.MODEL_STATE_UNLOADED,
    ModelState.LOADING: pb.MODEL_STATE_LOADING,
    ModelState.READY: pb.MODEL_STATE_READY,
    ModelState.UNLOADING: pb.MODEL_STATE_UNLOADING,
    ModelState.FAILED: pb.MODEL_STATE_FAILED,
}


class AdminService(AdminServiceServicer):
    """Loads and unloads the models of a repository. Whoever may call it is the server's to decide."""

    def __init__(self, repository: Repository, grace_s: float) -> None:
        """`grace_s` is what streams of a model that is unloaded get where a call does not say."""
        self._repository = repository
        self._grace_s = grace_s

    async def LoadModel(self, request: pb.LoadModelRequest, context: Context) -> pb.LoadModelResponse:
        async with statuses(context):
            _check_name(request.model)
            status = await self._repository.load(request.model)
        return pb.LoadModelResponse(model=_to_pb(status))

    async def UnloadModel(self, request: pb.UnloadModelRequest, context: Context) -> pb.UnloadModelResponse:
        async with statuses(context):
            _check_name(request.model)
            grace_s = self._grace_s
            if request.HasField("grace_ms"):
                if request.grace_ms > _LONGEST_GRACE_MS:
                    raise InvalidRequestError(
                        FieldViolation("grace_ms", f"is {request.grace_ms}; at most {_LONGEST_GRACE_MS}")
                    )
                grace_s = request.grace_ms / 1000
            status, all_finished = await self._repository.unload(request.model, grace_s)
        return pb.UnloadModelResponse(model=_to_pb(status), all_finished=all_finished)

    async def ListRepository(
        self, request: pb.ListRepositoryRequest, context: Context
    ) -> pb.ListRepositoryResponse:
        async with statuses(context):
            listed = self._repository.statuses()
        return pb.ListRepositoryResponse(models=[_to_pb(status) for status in listed])


def _check_name(model: str) -> None:
    if not model:
        raise InvalidRequestError(FieldViolation("model", "is missing; give a name from ListRepository"))


def _to_pb(status: ModelStatus) -> pb.RepositoryModel:
    return pb.RepositoryModel(
        name=status.name,
        path=str(status.path),
        state=STATE_TO_PB[status.state],
        error=status.error,
        phase=status.phase,
        phase_done=status.phase_done,
        num_streams=status.num_streams,
    )
