// Runs the forward of bridge.save_compiled(module, path, native=True) by TVM's own runtime, without Python:
// stdin has the elements of the argument tensors, in order; the float32 elements of the results are printed.
//
//   P=$(python -c "import tvm, tvm_ffi; print(tvm.__path__[0], tvm_ffi.__path__[0])"); set -- $P
//   g++ -std=c++17 run_compiled.cc -o run -I$2/include -L$1/lib -L$2/lib -ltvm_runtime -ltvm_ffi -Wl,-rpath,$1/lib:$2/lib
//   ./run path/forward.so < arguments.bin
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cstdio>
#include <vector>
using namespace tvm::ffi;

int main(int, char** argv) {
  Module vm = Module::LoadFromFile(argv[1])->GetFunction("vm_load_executable").value()().cast<Module>();
  vm->GetFunction("vm_initialization").value()(int(kDLCPU), 0, 2);
  auto inputs = vm->GetFunction("inputs").value()().cast<Array<Tensor>>();
  for (Tensor x : inputs)
    if (fread(x.data_ptr(), 1, GetDataSize(x), stdin) != GetDataSize(x)) return 1;
  std::vector<AnyView> arguments(inputs.begin(), inputs.end());
  Any results;
  vm->GetFunction("main").value().CallPacked(arguments.data(), arguments.size(), &results);
  for (Tensor y : results.cast<Array<Tensor>>())
    for (int64_t i = 0; i < y.numel(); i++) printf("%.9g\n", static_cast<float*>(y.data_ptr())[i]);
}
