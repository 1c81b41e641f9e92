// Runs the forward of bridge.save_compiled(module, path, native=True) by TVM's own runtime, without Python:
// stdin has the elements of the argument tensors, in order; the float32 elements of the results are printed.
//
//   P=$(python -c "import tvm, tvm_ffi; print(tvm.__path__[0], tvm_ffi.__path__[0])"); set -- $P
//   g++ -std=c++17 run_compiled.cc -o run -I$2/include -L$1/lib -L$2/lib -ltvm_runtime -ltvm_ffi -Wl,-rpath,$1/lib:$2/lib
//   ./run path/forward.so < arguments.bin
//
// Of a module on a GPU: g++ ... -Wl,--no-as-needed -ltvm_runtime_cuda, and ./run path/forward.so cuda
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cstdio>
#include <vector>
using namespace tvm::ffi;

int main(int argc, char** argv) {
  int device = argc > 2 ? kDLCUDA : kDLCPU;
  Module vm = Module::LoadFromFile(argv[1])->GetFunction("vm_load_executable").value()().cast<Module>();
  vm->GetFunction("vm_initialization").value()(device, 0, 2, int(kDLCPU), 0, 2);  // 2: memory comes from a pool
  Function write = Function::GetGlobalRequired("runtime.TVMTensorCopyFromBytes");
  Function read = Function::GetGlobalRequired("runtime.TVMTensorCopyToBytes");
  auto inputs = vm->GetFunction("inputs").value()().cast<Array<Tensor>>();
  for (Tensor x : inputs) {
    std::vector<char> bytes(GetDataSize(x));
    if (fread(bytes.data(), 1, bytes.size(), stdin) != bytes.size()) return 1;
    write(x, static_cast<void*>(bytes.data()), bytes.size());
  }
  std::vector<AnyView> arguments(inputs.begin(), inputs.end());
  Any results;
  vm->GetFunction("main").value().CallPacked(arguments.data(), arguments.size(), &results);
  for (Tensor y : results.cast<Array<Tensor>>()) {
    std::vector<float> numbers(y.numel());
    read(y, static_cast<void*>(numbers.data()), GetDataSize(y));
    for (float number : numbers) printf("%.9g\n", number);
  }
}
